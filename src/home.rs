//! Owns a node's data folder: its name, its lock, and `node.json` while the node runs.
//!
//! Called by node start-up (claims a folder) and by the inspection verbs (find running nodes).
//! Never: two processes in one folder; the lock goes with the process, however it ends.

use std::{
    fs::{File, TryLockError},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use starling_ids::NodeId;
use thiserror::Error;

use crate::config::{Config, data_home};

/// Name of the key file that `starling up` makes in its data folder.
pub const KEY_FILE: &str = "cluster.key";
const LOCK_FILE: &str = "lock";
const NAME_FILE: &str = "name";
const NODE_FILE: &str = "node.json";

/// What a running node says about itself in its data folder. Scripts may read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFile {
    /// The node's name.
    pub name: NodeId,
    /// Where its cluster port can be dialled from this machine.
    pub address: SocketAddr,
    /// Where its HTTP server listens, if it has one.
    pub http: Option<SocketAddr>,
    /// The process.
    pub pid: u32,
    /// Seconds since 1970 at its start; for people, never compared.
    pub started: u64,
    /// The cluster key's file; never the key.
    pub key_file: PathBuf,
}

/// Why a data folder cannot be used, or no running node was found.
#[derive(Debug, Error)]
pub enum HomeError {
    /// The folder or a file in it.
    #[error("data folder: {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "data folder {path}: another starling runs there{who}; give --data-dir DIR, or add a node with `starling join`"
    )]
    Taken {
        /// The folder.
        path: PathBuf,
        /// Name and process, when `node.json` tells.
        who: String,
    },
    /// Nowhere to put it.
    #[error("neither HOME nor XDG_DATA_HOME is set: give --data-dir DIR")]
    Nowhere,
    /// A join without a key.
    #[error(
        "no cluster key: copy the key file of the first node (its `starling keys path`) here and give --key-file FILE"
    )]
    NoKey,
    /// Nothing runs here.
    #[error("no running node found below {0}: start one with `starling up`, or give --node ADDR and --key-file FILE")]
    NoNode(PathBuf),
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> HomeError + '_ {
    move |source| HomeError::Io { path: path.to_owned(), source }
}

/// A claimed data folder. Dropping it removes `node.json` and gives the lock back.
#[derive(Debug)]
pub struct Home {
    /// The node's name.
    pub name: NodeId,
    /// The folder.
    pub dir: PathBuf,
    /// The key file to use; it may not exist yet when `make_key` is set.
    pub key_file: PathBuf,
    /// Make the key file when it does not exist: only for `starling up` without --key-file.
    pub make_key: bool,
    _lock: File,
}

impl Home {
    /// Chooses and locks a folder: the one given, else `up`'s own, else a free one below `nodes/` for `join`.
    pub fn claim(config: &Config) -> Result<Self, HomeError> {
        let (dir, lock) = match (&config.data_dir, config.join) {
            (Some(dir), _) => (dir.clone(), lock(dir)?),
            (None, false) => {
                let dir = data_home().ok_or(HomeError::Nowhere)?;
                let lock = lock(&dir)?;
                (dir, lock)
            }
            (None, true) => claim_slot(&data_home().ok_or(HomeError::Nowhere)?.join("nodes"), config.name.as_ref())?,
        };
        let dir = std::path::absolute(&dir).map_err(failed(&dir))?;
        let name = match &config.name {
            Some(name) => name.clone(),
            None => kept_name(&dir, config.join)?,
        };
        let (key_file, make_key) = key_path(config, &dir)?;
        Ok(Self { name, dir, key_file, make_key, _lock: lock })
    }

    /// Whether `starling join` on this machine finds the key without being told.
    #[must_use]
    pub fn key_is_default(&self) -> bool {
        data_home().is_some_and(|home| home.join(KEY_FILE) == self.key_file)
    }

    /// Writes `node.json` whole or not at all.
    pub fn publish(&self, file: &NodeFile) -> Result<(), HomeError> {
        let path = self.dir.join(NODE_FILE);
        let text =
            serde_json::to_string_pretty(file).map_err(|e| HomeError::Io { path: path.clone(), source: e.into() })?;
        write_whole(&path, &text)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let path = self.dir.join(NODE_FILE);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "node.json stays behind; the lock tells that it is old");
        }
    }
}

/// Every node that runs below a data folder: the folder itself first, then `nodes/*` by name.
///
/// `dir` is `--data-dir`; without it the default folder is searched.
pub fn running(dir: Option<&Path>) -> Result<Vec<(PathBuf, NodeFile)>, HomeError> {
    let base = dir.map(Path::to_owned).or_else(data_home).ok_or(HomeError::Nowhere)?;
    let mut folders = vec![base.clone()];
    folders.extend(slots(&base.join("nodes")));
    let found: Vec<_> = folders.into_iter().filter_map(|dir| Some((dir.clone(), running_in(&dir)?))).collect();
    if found.is_empty() { Err(HomeError::NoNode(base)) } else { Ok(found) }
}

/// The node that runs in a folder: its file is there and its lock is held.
fn running_in(dir: &Path) -> Option<NodeFile> {
    let text = std::fs::read_to_string(dir.join(NODE_FILE)).ok()?;
    let file = serde_json::from_str(&text).ok()?;
    let lock = File::open(dir.join(LOCK_FILE)).ok()?;
    matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)).then_some(file)
}

fn lock(dir: &Path) -> Result<File, HomeError> {
    std::fs::create_dir_all(dir).map_err(failed(dir))?;
    let path = dir.join(LOCK_FILE);
    let file = File::options().create(true).append(true).open(&path).map_err(failed(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(source)) => Err(HomeError::Io { path, source }),
        Err(TryLockError::WouldBlock) => {
            let who = running_in(dir).map_or_else(String::new, |f| format!(" ({}, process {})", f.name, f.pid));
            Err(HomeError::Taken { path: dir.to_owned(), who })
        }
    }
}

/// A folder below `nodes/`: the one of the name, else the first that no process uses, else a new one.
fn claim_slot(nodes: &Path, name: Option<&NodeId>) -> Result<(PathBuf, File), HomeError> {
    if let Some(name) = name {
        let dir = nodes.join(name.as_str());
        let lock = lock(&dir)?;
        return Ok((dir, lock));
    }
    // Only folders that were made without a name are taken again: their `name` file says so.
    for dir in slots(nodes).into_iter().filter(|dir| dir.join(NAME_FILE).exists()) {
        match lock(&dir) {
            Err(HomeError::Taken { .. }) => {}
            claimed => return claimed.map(|lock| (dir, lock)),
        }
    }
    let dir = nodes.join(fresh_name());
    let lock = lock(&dir)?;
    Ok((dir, lock))
}

fn slots(nodes: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(nodes).map(|entries| entries.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    dirs.retain(|dir| dir.is_dir());
    dirs.sort();
    dirs
}

/// The name kept in a folder; made on first use. `up` is named after the host, others after host and folder or chance.
fn kept_name(dir: &Path, join: bool) -> Result<NodeId, HomeError> {
    let path = dir.join(NAME_FILE);
    if let Ok(text) = std::fs::read_to_string(&path)
        && let Ok(name) = text.trim().parse()
    {
        return Ok(name);
    }
    let slot = dir.file_name().and_then(|f| f.to_str()).filter(|f| join && f.starts_with(&host_name()));
    let text = match slot {
        Some(slot) => slot.to_owned(),
        None if join => fresh_name(),
        None => host_name(),
    };
    let name = NodeId::new(&text)
        .map_err(|e| HomeError::Io { path: path.clone(), source: io::Error::new(io::ErrorKind::InvalidData, e) })?;
    write_whole(&path, name.as_str())?;
    Ok(name)
}

/// The host's name as a node name: its first label, lower case, at most 40 bytes, `node` when there is none.
fn host_name() -> String {
    let text =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::fs::read_to_string("/etc/hostname"));
    node_name(text.unwrap_or_default().trim())
}

fn node_name(host: &str) -> String {
    let label = host.split('.').next().unwrap_or_default().to_lowercase();
    let plain: String =
        label.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' }).collect();
    let name: String = plain.trim_matches(['-', '_']).chars().take(40).collect();
    if name.is_empty() { "node".to_owned() } else { name }
}

/// The host's name and four letters by chance, so that two machines of one image differ.
fn fresh_name() -> String {
    let mut chance = RandomState::new().hash_one(std::process::id());
    let mut name = host_name() + "-";
    for _ in 0..4 {
        name.push(char::from(b'a' + u8::try_from(chance % 26).unwrap_or_default()));
        chance /= 26;
    }
    name
}

/// The key file, and whether it may be made: given, else in the folder, else the one of `starling up`.
fn key_path(config: &Config, dir: &Path) -> Result<(PathBuf, bool), HomeError> {
    if let Some(given) = &config.key_file {
        return Ok((given.clone(), false));
    }
    let own = dir.join(KEY_FILE);
    if !config.join || own.exists() {
        return Ok((own, !config.join));
    }
    let of_up = data_home().map(|home| home.join(KEY_FILE)).filter(|path| path.exists());
    of_up.map(|path| (path, false)).ok_or(HomeError::NoKey)
}

/// Writes beside and renames, so that a reader sees the old text or the new one.
fn write_whole(path: &Path, text: &str) -> Result<(), HomeError> {
    let beside = path.with_extension("new");
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()
    });
    written.and_then(|()| std::fs::rename(&beside, path)).map_err(failed(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: Option<&Path>, flags: &[(&'static str, &str)], join: bool) -> Config {
        let mut flags: Vec<_> = flags.iter().map(|(name, text)| (*name, (*text).to_owned())).collect();
        flags.push(("engine", "simulated".into()));
        if join {
            flags.push(("seeds", "127.0.0.1:1".into()));
        }
        if let Some(dir) = dir {
            flags.push(("data-dir", dir.display().to_string()));
        }
        Config::load(join, None, &flags).unwrap()
    }

    #[test]
    fn a_folder_is_claimed_once_and_free_again_after_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(Some(dir.path()), &[("name", "one")], false);
        let home = Home::claim(&config).unwrap();
        assert!(home.make_key && home.key_file == dir.path().join(KEY_FILE));
        let error = Home::claim(&config).unwrap_err();
        assert!(matches!(error, HomeError::Taken { .. }), "{error}");
        drop(home);
        Home::claim(&config).unwrap();
    }

    #[test]
    fn node_json_is_found_only_while_its_process_holds_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::claim(&config(Some(dir.path()), &[("name", "one")], false)).unwrap();
        let file = NodeFile {
            name: home.name.clone(),
            address: "127.0.0.1:7400".parse().unwrap(),
            http: None,
            pid: 1,
            started: 0,
            key_file: home.key_file.clone(),
        };
        home.publish(&file).unwrap();
        assert_eq!(running(Some(dir.path())).unwrap()[0].1, file);
        let text = std::fs::read_to_string(dir.path().join(NODE_FILE)).unwrap();
        drop(home);
        assert!(running(Some(dir.path())).is_err());
        std::fs::write(dir.path().join(NODE_FILE), text).unwrap();
        assert!(running(Some(dir.path())).is_err(), "a file left by a killed process does not count");
    }

    #[test]
    fn nameless_joins_take_the_first_free_folder_and_keep_its_name() {
        let nodes = tempfile::tempdir().unwrap();
        let (first, held) = claim_slot(nodes.path(), None).unwrap();
        let name = kept_name(&first, true).unwrap();
        let (second, _) = claim_slot(nodes.path(), None).unwrap();
        assert_ne!(first, second);
        drop(held);
        let (again, _) = claim_slot(nodes.path(), None).unwrap();
        assert_eq!(again, first);
        assert_eq!(kept_name(&again, true).unwrap(), name);
    }

    #[test]
    fn host_names_become_node_names() {
        for (host, name) in [("Web01.Example.org", "web01"), ("-x-", "x"), ("", "node"), ("a b", "a-b")] {
            assert_eq!(node_name(host), name);
        }
        assert!(NodeId::new(&fresh_name()).is_ok());
    }
}
