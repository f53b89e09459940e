//! The boot counter of a node: kept in its data directory, raised once for each start, never a wall clock.
//!
//! Called at start, before anything is sent. Bounds: one file of a few bytes, replaced as a whole.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use starling_ids::Incarnation;
use thiserror::Error;

const FILE: &str = "incarnation";

/// Why the counter could not be raised.
#[derive(Debug, Error)]
pub enum BootError {
    /// The directory or the file in it cannot be read or written.
    #[error("the boot counter {path}: {source}; the data directory must exist and be writable")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file holds something else than a number.
    #[error("the boot counter {path} holds {found:?}, which is not a number; write one above all earlier ones")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The first characters of it.
        found: String,
    },
}

/// Raises the counter in `data_dir`, creating both if need be, and returns the new value, at least 1.
pub fn next(data_dir: &Path) -> Result<Incarnation, BootError> {
    raise_above(data_dir, Incarnation(0))
}

/// Raises the counter above its stored value and above `floor`, for a node whose counter was lost.
pub fn raise_above(data_dir: &Path, floor: Incarnation) -> Result<Incarnation, BootError> {
    let path = data_dir.join(FILE);
    fs::create_dir_all(data_dir).map_err(|source| BootError::Io { path: data_dir.into(), source })?;
    let stored = read(&path)?;
    let raised = Incarnation(stored.0.max(floor.0) + 1);
    write(data_dir, &path, raised).map_err(|source| BootError::Io { path, source })?;
    Ok(raised)
}

fn read(path: &Path) -> Result<Incarnation, BootError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Incarnation(0)),
        Err(source) => return Err(BootError::Io { path: path.into(), source }),
    };
    let text = String::from_utf8_lossy(&text);
    // The highest number is left unused so that one can always be added.
    match text.trim().parse::<u64>() {
        Ok(value) if value < u64::MAX => Ok(Incarnation(value)),
        _ => Err(BootError::Damaged { path: path.into(), found: text.chars().take(40).collect() }),
    }
}

/// The old value or the new one is on disk at any moment, and the new one when this returns.
fn write(data_dir: &Path, path: &Path, value: Incarnation) -> io::Result<()> {
    let staged = data_dir.join(format!("{FILE}.new"));
    let mut file = File::create(&staged)?;
    file.write_all(format!("{value}\n").as_bytes())?;
    file.sync_all()?;
    fs::rename(&staged, path)?;
    File::open(data_dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mem_17_each_start_is_higher_whatever_the_clock_says() {
        let dir = tempfile::tempdir().expect("dir");
        let data = dir.path().join("deep/er");
        assert_eq!(next(&data).expect("boots"), Incarnation(1));
        assert_eq!(next(&data).expect("boots"), Incarnation(2));
        let ancient = std::time::SystemTime::UNIX_EPOCH;
        File::open(data.join(FILE)).expect("file").set_modified(ancient).expect("sets");
        assert_eq!(next(&data).expect("boots"), Incarnation(3));
    }

    #[test]
    fn a_lost_counter_starts_above_what_the_cluster_remembers() {
        let dir = tempfile::tempdir().expect("dir");
        assert_eq!(raise_above(dir.path(), Incarnation(7)).expect("boots"), Incarnation(8));
        assert_eq!(raise_above(dir.path(), Incarnation(3)).expect("boots"), Incarnation(9));
    }

    #[test]
    fn a_damaged_counter_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().expect("dir");
        for bad in ["", "x", "-1", "18446744073709551615"] {
            fs::write(dir.path().join(FILE), bad).expect("writes");
            let error = next(dir.path()).expect_err("refuses");
            assert!(error.to_string().contains("incarnation"), "{error}");
        }
    }

    #[test]
    fn a_half_written_counter_of_a_crashed_start_is_not_read() {
        let dir = tempfile::tempdir().expect("dir");
        assert_eq!(next(dir.path()).expect("boots"), Incarnation(1));
        fs::write(dir.path().join("incarnation.new"), "99").expect("writes");
        assert_eq!(next(dir.path()).expect("boots"), Incarnation(2));
    }
}
