//! Shows how far the model has been loaded: a bar on a terminal, one line a stage otherwise. Standard error only.
//!
//! Called from the loading thread.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use starling_engine::Progress;

const STEPS: u64 = 1000;

/// One loading.
#[derive(Debug)]
pub struct LoadProgress {
    bar: Option<ProgressBar>,
    stage: &'static str,
}

impl LoadProgress {
    /// Begins; `what` is the file's name.
    #[must_use]
    pub fn begin(what: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            tracing::info!(model = what, "loading the model");
            return Self { bar: None, stage: "" };
        }
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{prefix} {msg:10} [{bar:40}] {percent:>3} %  {elapsed}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what.to_owned());
        Self { bar: Some(bar), stage: "" }
    }

    /// Takes one report.
    pub fn report(&mut self, progress: &Progress) {
        let news = self.stage != progress.stage;
        self.stage = progress.stage;
        match &self.bar {
            Some(bar) => {
                if news {
                    bar.set_message(progress.stage);
                }
                bar.set_position(thousandths(progress.share));
            }
            None if news => tracing::info!(stage = progress.stage, "loading the model"),
            None => {}
        }
    }
}

impl Drop for LoadProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A share of 0 to 1 in steps of the bar.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "0 to 1000")]
fn thousandths(share: f32) -> u64 {
    (share.clamp(0.0, 1.0) * STEPS as f32) as u64
}

#[cfg(test)]
mod tests {
    #[test]
    fn shares_stay_on_the_bar() {
        assert_eq!([-1.0, 0.0, 0.5, 1.0, 7.0].map(super::thousandths), [0, 0, 500, 1000, 1000]);
    }
}
