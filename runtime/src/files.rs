//! File output. Every operation passes a gate, in which tests simulate full or failing disks; files are written under a
//! temporary name, synced if they must be durable, and renamed.
//!
//! Files have the mode given by the umask. Devices, FIFOs and open files of the process (`/dev/stdout`) are written directly; a
//! symbolic link is followed and kept.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An operation on a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Creates a file, or opens it for writing.
    Create,
    /// Writes this many bytes.
    Write(usize),
    /// Syncs a file.
    Sync,
    /// Renames a file or folder.
    Rename,
    /// Removes a file, or a folder with its content.
    Remove,
    /// Creates a folder.
    CreateFolder,
}

/// Called before every operation; returns its error, or the number of bytes that a write accepts.
pub type Gate = fn(Operation, &Path) -> io::Result<usize>;

static GATE: OnceLock<Gate> = OnceLock::new();

/// Installs a gate for all operations of this process; it cannot be replaced.
pub fn set_gate(gate: Gate) {
    GATE.get_or_init(|| gate);
}

fn pass(operation: Operation, path: &Path) -> io::Result<usize> {
    match (GATE.get(), operation) {
        (Some(gate), _) => gate(operation, path),
        (None, Operation::Write(bytes)) => Ok(bytes),
        (None, _) => Ok(0),
    }
}

/// A file open for writing.
#[derive(Debug)]
pub struct Sink {
    file: File,
    path: PathBuf,
}

impl Sink {
    /// Creates or truncates a file.
    ///
    /// # Errors
    /// Those of the file system, as of every function here.
    pub fn create(path: &Path) -> io::Result<Sink> {
        Sink::open(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// Opens a file for appending, or creates it.
    pub fn append(path: &Path) -> io::Result<Sink> {
        Sink::open(path, OpenOptions::new().append(true).create(true))
    }

    fn open(path: &Path, options: &OpenOptions) -> io::Result<Sink> {
        pass(Operation::Create, path)?;
        Ok(Sink { file: options.open(path)?, path: path.into() })
    }

    /// Syncs the file.
    pub fn sync(&self) -> io::Result<()> {
        pass(Operation::Sync, &self.path)?;
        self.file.sync_all()
    }

    /// Removes the last `bytes` bytes; does nothing unless it is a regular file.
    pub fn cut(&self, bytes: u64) -> io::Result<()> {
        let len = self.file.metadata()?.len();
        self.file.set_len(len.saturating_sub(bytes))
    }

    /// Sets the length of the file without writing the new bytes.
    pub fn reserve(&self, bytes: u64) -> io::Result<()> {
        pass(Operation::Write(0), &self.path)?;
        self.file.set_len(bytes)
    }

    /// Whether it is a terminal.
    pub fn is_terminal(&self) -> bool {
        self.file.is_terminal()
    }

    /// Another handle of the same file.
    pub fn try_clone(&self) -> io::Result<Sink> {
        Ok(Sink { file: self.file.try_clone()?, path: self.path.clone() })
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = pass(Operation::Write(bytes.len()), &self.path)?;
        self.file.write(&bytes[..taken.min(bytes.len())])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Sink {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Writes a file.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    Sink::create(path)?.write_all(bytes)
}

/// Writes a file durably.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = Sink::create(path)?;
    file.write_all(bytes)?;
    file.sync()
}

/// Syncs the entries of a folder.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    pass(Operation::Sync, path)?;
    File::open(path)?.sync_all()
}

/// Renames.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    pass(Operation::Rename, to)?;
    fs::rename(from, to)
}

/// Removes a file.
pub fn remove(path: &Path) -> io::Result<()> {
    pass(Operation::Remove, path)?;
    fs::remove_file(path)
}

/// Removes a folder and its content.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    pass(Operation::Remove, path)?;
    fs::remove_dir_all(path)
}

/// Creates a folder and its parents.
pub fn create_folder(path: &Path) -> io::Result<()> {
    pass(Operation::CreateFolder, path)?;
    fs::create_dir_all(path)
}

/// Replaces a folder, if it exists, atomically where the system can exchange names, otherwise by two renames.
pub fn replace_folder(new: &Path, old: &Path) -> io::Result<()> {
    if !old.exists() {
        return rename(new, old);
    }
    pass(Operation::Rename, old)?;
    match exchange(new, old) {
        Ok(()) => {
            // The new folder is in place; remains of the old one are harmless.
            let _ = remove_folder(new);
            Ok(())
        }
        Err(e) if e.kind() == ErrorKind::Unsupported || e.kind() == ErrorKind::InvalidInput => {
            let aside = beside(old);
            fs::rename(old, &aside)?;
            fs::rename(new, old).inspect_err(|_| {
                // The first error is the one to report.
                let _ = fs::rename(&aside, old);
            })?;
            let _ = remove_folder(&aside);
            Ok(())
        }
        Err(e) => Err(e),
    }
}

#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// A unique name beside `path`.
pub fn beside(path: &Path) -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}-{number}", std::process::id()));
    path.with_file_name(name)
}

/// The destination of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A regular file, which may not exist yet: it is written under a temporary name and renamed.
    File(PathBuf),
    /// A device, a FIFO or an open file: it is written directly.
    Stream(PathBuf),
}

/// Follows the links of a path to what they name, which may not exist; links of open files are not followed.
pub fn followed(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_path_buf();
    // The number of links that systems follow.
    for _ in 0..40 {
        let folder = at.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = fs::canonicalize(folder.unwrap_or(Path::new(".")))?;
        let name = at.file_name().ok_or(ErrorKind::IsADirectory)?;
        let found = folder.join(name);
        match fs::read_link(&found) {
            Ok(to) if !folder.starts_with("/proc") => at = folder.join(to),
            _ => return Ok(found),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

/// The folder that a path names: what its links name if it is one, else itself. It may not exist.
pub fn followed_folder(path: &Path) -> io::Result<PathBuf> {
    // Without a separator at its end, after which a system follows the link.
    let path: PathBuf = path.components().collect();
    if path.is_symlink() { followed(&path) } else { Ok(path) }
}

impl Place {
    /// Follows the links of a path.
    pub fn of(path: &Path) -> io::Result<Place> {
        let found = followed(path)?;
        let is_open = found.parent().is_some_and(|folder| folder.starts_with("/proc"));
        if is_open { Ok(Place::Stream(found)) } else { Place::of_found(found) }
    }

    fn of_found(path: PathBuf) -> io::Result<Place> {
        let kind = match fs::metadata(&path) {
            Ok(found) => found.file_type(),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Place::File(path)),
            Err(e) => return Err(e),
        };
        match kind {
            kind if kind.is_dir() => Err(ErrorKind::IsADirectory.into()),
            kind if kind.is_file() => Ok(Place::File(path)),
            kind if is_stream(kind) => Ok(Place::Stream(path)),
            _ => Err(io::Error::other("it is neither a file, a FIFO nor a character device")),
        }
    }

    /// Whether it is the standard output of this process.
    pub fn is_standard_output(path: &Path) -> bool {
        let names = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
        names.iter().any(|name| path == Path::new(name))
    }

    /// Checks whether it can be written, without leaving anything behind.
    pub fn probe(&self) -> io::Result<()> {
        match self {
            // Opening a FIFO waits for its reader.
            Place::Stream(path) if is_fifo(path) => Ok(()),
            Place::Stream(path) => OpenOptions::new().write(true).open(path).map(drop),
            Place::File(path) => {
                if path.exists() {
                    OpenOptions::new().write(true).open(path)?;
                }
                let aside = beside(path);
                drop(Sink::create(&aside)?);
                remove(&aside)
            }
        }
    }
}

#[cfg(unix)]
fn is_stream(kind: fs::FileType) -> bool {
    use std::os::unix::fs::FileTypeExt;
    kind.is_char_device() || kind.is_fifo()
}

#[cfg(not(unix))]
fn is_stream(_: fs::FileType) -> bool {
    false
}

#[cfg(unix)]
fn is_fifo(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|m| m.file_type().is_fifo())
}

#[cfg(not(unix))]
fn is_fifo(_: &Path) -> bool {
    false
}

/// Writes a file atomically, and removes the temporary file after an error.
pub fn deliver(path: &Path, put: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let buffered = |path: &Path| {
        let mut sink = io::BufWriter::with_capacity(1 << 20, Sink::create(path)?);
        put(&mut sink)?;
        sink.flush()
    };
    let path = match Place::of(path)? {
        Place::Stream(path) => return buffered(&path),
        Place::File(path) => path,
    };
    let aside = beside(&path);
    let written = buffered(&aside).and_then(|()| rename(&aside, &path));
    if written.is_err() {
        // The first error is the one to report; the file may not exist.
        let _ = remove(&aside);
    }
    written
}
