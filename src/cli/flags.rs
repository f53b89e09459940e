//! The flags of `up`, `join` and `config`, made from the table of settings.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};

use crate::config::settings::{SETTINGS, Setting};

/// What was said on the command line, as (setting, text). `JOIN` picks which verb's defaults the help shows.
#[derive(Debug, Default)]
pub(super) struct NodeFlags<const JOIN: bool> {
    pub(super) file: Option<PathBuf>,
    pub(super) values: Vec<(&'static str, String)>,
}

impl<const JOIN: bool> NodeFlags<JOIN> {
    fn argument(setting: &'static Setting) -> Arg {
        let default = if JOIN { setting.join } else { setting.up };
        let default = default.trim_matches(['<', '>']);
        let long = format!(
            "{}.\n\nMust be {}. Default: {default}. Variable: {}.",
            setting.help,
            setting.rule,
            setting.variable()
        );
        Arg::new(setting.name)
            .long(setting.name)
            .value_name(setting.value)
            .help(format!("{} [default: {default}]", setting.help))
            .long_help(long)
            .help_heading("Settings")
            .action(if matches!(setting.name, "role" | "label") { ArgAction::Append } else { ArgAction::Set })
    }
}

impl<const JOIN: bool> Args for NodeFlags<JOIN> {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help("TOML file with settings, one key per flag; before STARLING_CONFIG");
        SETTINGS.iter().fold(command.arg(file), |command, setting| command.arg(Self::argument(setting)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const JOIN: bool> FromArgMatches for NodeFlags<JOIN> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>("config").cloned();
        for setting in SETTINGS {
            let said: Vec<&str> =
                matches.get_many::<String>(setting.name).unwrap_or_default().map(String::as_str).collect();
            if !said.is_empty() {
                self.values.push((setting.name, said.join(",")));
            }
        }
        Ok(())
    }
}
