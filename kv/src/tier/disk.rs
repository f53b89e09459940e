//! Shell: the files of the disk tier. One folder holds `blocks` (places of equal size), `index` (lines that are only ever
//! appended) and `lock`.
//!
//! Called by the tiers' threads; calls the file system. Never: decides what lies where, trusts what it reads (the record's
//! checksums decide). Bounds: as many places as were paid for; an index of twice the lines that are needed.
//! A crash at any moment loses lines or blocks at the end and nothing else: a place whose bytes are of another block
//! than its line says fails its checksum.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use starling_ids::BlockHash;
use thiserror::Error;

use super::{
    TierShape,
    page::{PAGE, PageBuffer},
    record::{LINE, Line, first_line, place_bytes, replay, settle},
    shelf::Stored,
};

/// Lines beyond twice the needed ones before the index is written anew.
const SLACK_LINES: usize = 4_096;

/// Why a folder cannot be a disk tier.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The system refused something.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Another worker has it.
    #[error("{0} is in use by another worker")]
    InUse(PathBuf),
    /// Not one block fits.
    #[error("{bytes} bytes on disk hold no block: one takes {place_bytes}")]
    TooSmall {
        /// Bytes paid for.
        bytes: u64,
        /// Bytes of a place.
        place_bytes: usize,
    },
}

/// Where the bytes of blocks lie. Addresses, lengths and offsets are multiples of [`PAGE`].
pub trait BlockFile: Send + Sync + fmt::Debug {
    /// Fills the buffer from `at` on; an error when the file is shorter.
    fn load_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes all bytes from `at` on.
    fn store_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
}

impl BlockFile for File {
    fn load_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }

    fn store_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }
}

/// The open folder of one worker.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) blocks: Arc<dyn BlockFile>,
    place_bytes: u64,
    index: Mutex<Index>,
    /// Held for as long as the folder is open.
    lock: File,
}

#[derive(Debug)]
struct Index {
    folder: PathBuf,
    /// `None` once a line could not be written: what follows would have a hole before it.
    file: Option<File>,
    lines: usize,
}

/// What a folder held when it was opened.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The longest unused first.
    pub(super) kept: Vec<(BlockHash, Stored)>,
    /// Lines of the index that were passed over.
    pub(super) broken: usize,
}

impl Disk {
    /// Opens a folder, which is made when it is not there, for `bytes` bytes of blocks; the number of places and what was
    /// kept in them. `file` stands in for the file of blocks in tests.
    pub(super) fn open(
        folder: &Path,
        bytes: u64,
        shape: &TierShape,
        file: Option<Arc<dyn BlockFile>>,
    ) -> Result<(Self, u32, Found), DiskError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| DiskError::Io { path, source }
        };
        let place = place_bytes(shape);
        let places = u32::try_from(bytes / place as u64).unwrap_or(u32::MAX);
        if places == 0 {
            return Err(DiskError::TooSmall { bytes, place_bytes: place });
        }
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let lock = lock(folder)?;
        let path = folder.join("index");
        let found = found(&path, shape, places).map_err(failed(&path))?;
        let file = match file {
            Some(file) => file,
            None => open_blocks(&folder.join("blocks"), u64::from(places) * place as u64)?,
        };
        let mut index = Index { folder: folder.to_owned(), file: None, lines: 0 };
        index.write_anew(shape, &found.kept).map_err(failed(&path))?;
        let index = Mutex::new(index);
        Ok((Self { blocks: file, place_bytes: place as u64, index, lock }, places, found))
    }

    /// Reads a place.
    pub(super) fn read(&self, place: u32) -> io::Result<PageBuffer> {
        let mut buffer = PageBuffer::new(self.place_bytes as usize);
        self.blocks.load_at(buffer.as_mut_slice(), u64::from(place) * self.place_bytes)?;
        Ok(buffer)
    }

    /// Writes a place.
    pub(super) fn write(&self, place: u32, buffer: &PageBuffer) -> io::Result<()> {
        self.blocks.store_at(buffer, u64::from(place) * self.place_bytes)
    }

    /// Bytes of a place.
    pub(super) fn place_bytes(&self) -> usize {
        self.place_bytes as usize
    }

    /// Appends changes to the index; `live` tells what is there by now, should it be time to write the index anew.
    pub(super) fn append(
        &self,
        shape: &TierShape,
        lines: &[Line],
        live: impl FnOnce() -> Vec<(BlockHash, Stored)>,
        live_count: usize,
    ) -> io::Result<()> {
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        if index.lines + lines.len() > 2 * live_count + SLACK_LINES {
            // What is asked for here is part of what is there by now, or is gone again.
            return index.write_anew(shape, &live());
        }
        index.append(lines)
    }

    /// Gives the folder free for its next owner: no thread reads or writes in it any more.
    pub(super) fn release(&self) {
        if let Err(error) = self.lock.unlock() {
            tracing::debug!(%error, "the folder of the disk tier stays locked until its file is closed");
        }
    }

    /// Makes the index last.
    pub(super) fn sync(&self) -> io::Result<()> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        index.file.as_ref().map_or(Ok(()), File::sync_data)
    }
}

impl Index {
    fn append(&mut self, lines: &[Line]) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let bytes: Vec<u8> = lines.iter().flat_map(|line| line.to_bytes()).collect();
        if let Err(error) = file.write_all(&bytes) {
            self.file = None;
            return Err(error);
        }
        self.lines += lines.len();
        Ok(())
    }

    /// Writes what is there into a new file and puts that in the place of the old one.
    fn write_anew(&mut self, shape: &TierShape, kept: &[(BlockHash, Stored)]) -> io::Result<()> {
        let (new, path) = (self.folder.join("index.new"), self.folder.join("index"));
        let mut bytes = Vec::with_capacity((kept.len() + 1) * LINE);
        bytes.extend(first_line(shape));
        kept.iter().for_each(|(hash, stored)| bytes.extend(Line::Put(*hash, *stored).to_bytes()));
        fs::write(&new, &bytes)?;
        let file = OpenOptions::new().append(true).open(&new)?;
        file.sync_data()?;
        fs::rename(&new, &path)?;
        (self.file, self.lines) = (Some(file), kept.len());
        Ok(())
    }
}

fn lock(folder: &Path) -> Result<File, DiskError> {
    let path = folder.join("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|source| DiskError::Io { path: path.clone(), source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(DiskError::InUse(folder.to_owned())),
        Err(fs::TryLockError::Error(source)) => Err(DiskError::Io { path, source }),
    }
}

fn found(path: &Path, shape: &TierShape, places: u32) -> io::Result<Found> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::default()),
        Err(error) => return Err(error),
    };
    let Some(replay) = replay(&bytes, shape) else {
        tracing::warn!(path = %path.display(), "the disk tier held blocks of another model or layout; they are given up");
        return Ok(Found::default());
    };
    let mut kept = settle(&replay.lines);
    kept.retain(|(_, stored)| stored.place < places);
    Ok(Found { kept, broken: replay.broken })
}

/// Opens the file of blocks past the page cache where the file system can do that, and cuts it to `bytes_max`.
fn open_blocks(path: &Path, bytes_max: u64) -> Result<Arc<dyn BlockFile>, DiskError> {
    let failed = |source| DiskError::Io { path: path.to_owned(), source };
    let plain = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).map_err(failed)?;
    if plain.metadata().map_err(failed)?.len() > bytes_max {
        plain.set_len(bytes_max).map_err(failed)?;
    }
    match direct(path) {
        Ok(file) => Ok(Arc::new(file)),
        Err(error) => {
            tracing::info!(path = %path.display(), %error, "no direct reads and writes here; they go through the page cache");
            Ok(Arc::new(plain))
        }
    }
}

/// The file without the page cache, if a read gets through.
fn direct(path: &Path) -> io::Result<File> {
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).write(true).custom_flags(flag).open(path)?;
    let mut page = PageBuffer::new(PAGE);
    // Nothing at all is read from an empty file, which is no fault.
    file.read_at(page.as_mut_slice(), 0)?;
    Ok(file)
}
