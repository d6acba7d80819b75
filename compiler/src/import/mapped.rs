//! Memory-mapped files, shared as byte slices.
//!
//! Only regular files are accepted: pipes and devices have no size and may block. External data files that a model names must
//! resolve to its directory, unless the user allows others.

use memmap2::Mmap;
use prost::bytes::Bytes;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The bytes of a file, mapped into memory. Slices of the result keep the mapping alive.
///
/// # Errors
/// If the file cannot be opened or mapped, or is not a regular file.
pub(crate) fn map(path: &Path) -> io::Result<Bytes> {
    mapped(&open(path, 0)?)
}

/// Opens a regular file, without waiting for a pipe's other end.
fn open(path: &Path, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
}

fn mapped(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is private and read-only, and outlives every slice of it. As with every
    // mapping, another process that truncates the file while Frit reads it makes the read fail.
    let mapping = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(mapping))
}

/// Where a model lies, and so the files of its external data.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folder {
    /// The folder of the model's path.
    named: PathBuf,
    /// The folder that the model's file really lies in, if links lead there: caches keep files under other names, and
    /// folders of links to them.
    linked: Option<PathBuf>,
    /// The model itself, which may hold its own data.
    model: PathBuf,
    /// Whether links may lead anywhere.
    anywhere: bool,
}

impl Folder {
    /// The folder of a model's file; data may lie elsewhere if `anywhere`.
    pub(crate) fn of(model: &Path, anywhere: bool) -> Self {
        let parent = |path: &Path| match path.parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let linked = model.canonicalize().ok().map(|path| parent(&path));
        Folder { named: parent(model), linked, model: model.into(), anywhere }
    }

    /// The path of a file beside the model.
    pub(crate) fn join(&self, location: &str) -> PathBuf {
        self.named.join(location)
    }

    /// The bytes of a file beside the model.
    ///
    /// # Errors
    /// If it lies elsewhere, has names elsewhere, or is no regular file.
    pub(crate) fn map(&self, location: &str) -> io::Result<Bytes> {
        if self.model.file_name().is_some_and(|own| own == location) {
            return map(&self.model);
        }
        let path = self.join(location);
        if self.anywhere {
            return map(&path);
        }
        let refuse = |what: String| {
            let message = format!("{what}; --allow-external-data permits it");
            Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
        };
        let real = path.canonicalize()?;
        let folders = [self.named.canonicalize().ok(), self.linked.clone()];
        if !folders.iter().flatten().any(|folder| real.starts_with(folder)) {
            return refuse(format!(
                "it leads to {}, outside of the model's folder",
                real.display()
            ));
        }
        // All links are followed already.
        let file = open(&real, libc::O_NOFOLLOW)?;
        match file.metadata()?.nlink() {
            0 | 1 => mapped(&file),
            n => refuse(format!("it is one of {n} hard links, whose others may lie anywhere")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn error(folder: &Folder, location: &str) -> String {
        folder.map(location).expect_err(location).to_string()
    }

    #[test]
    fn links_lead_as_far_as_the_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("model/data")).expect("a folder");
        fs::create_dir_all(at("elsewhere")).expect("a folder");
        for file in ["model/m.onnx", "model/data/w", "elsewhere/w", "elsewhere/h"] {
            fs::write(at(file), b"abc").expect("a file");
        }
        symlink("data/w", at("model/inside")).expect("a link");
        symlink(at("elsewhere/w"), at("model/outside")).expect("a link");
        symlink(at("elsewhere"), at("model/sub")).expect("a link");
        fs::hard_link(at("elsewhere/h"), at("model/hard")).expect("a link");
        let folder = Folder::of(&at("model/m.onnx"), false);
        for location in ["data/w", "inside"] {
            assert_eq!(&folder.map(location).expect(location)[..], b"abc");
        }
        for location in ["outside", "sub/w"] {
            assert!(error(&folder, location).contains("outside of the model's folder"));
            assert!(error(&folder, location).contains("--allow-external-data"));
        }
        assert!(error(&folder, "hard").contains("2 hard links"));
        assert!(error(&folder, "missing").contains("No such file"));
        let anywhere = Folder::of(&at("model/m.onnx"), true);
        for location in ["data/w", "inside", "outside", "sub/w", "hard"] {
            assert_eq!(&anywhere.map(location).expect(location)[..], b"abc");
        }
    }

    #[test]
    fn a_cache_may_keep_model_and_data_under_other_names() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("blobs")).expect("a folder");
        fs::create_dir_all(at("snapshots/1")).expect("a folder");
        for (file, name) in [("blobs/a", "model.onnx"), ("blobs/b", "model.onnx.data")] {
            fs::write(at(file), b"abc").expect("a file");
            symlink(format!("../../{file}"), at("snapshots/1").join(name)).expect("a link");
        }
        let folder = Folder::of(&at("snapshots/1/model.onnx"), false);
        assert_eq!(&folder.map("model.onnx.data").expect("beside the model")[..], b"abc");
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
        assert!(made.success());
        for anywhere in [false, true] {
            let folder = Folder::of(&dir.path().join("m.onnx"), anywhere);
            assert!(error(&folder, "pipe").contains("not a regular file"));
            assert!(error(&folder, "").contains("not a regular file"));
        }
        for path in [pipe.as_path(), dir.path(), Path::new("/dev/zero")] {
            let refused = map(path).expect_err("not regular").to_string();
            assert!(refused.contains("not a regular file"), "{refused}");
        }
    }
}
