//! Bytes in memory or of a memory-mapped file, which stays mapped while they are used.

use crate::DataError;
use memmap2::Mmap;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

/// Reference-counted bytes.
#[derive(Clone)]
pub struct Bytes {
    all: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// Maps a file: unread pages use no memory, and read ones can be evicted.
    ///
    /// # Errors
    /// If it is not a regular file, or cannot be mapped.
    pub(crate) fn map(path: &Path) -> Result<Bytes, DataError> {
        let meta = std::fs::metadata(path).map_err(DataError::io(path))?;
        if !meta.is_file() {
            return Err(DataError::content(path, "is not a regular file"));
        }
        let file = File::open(path).map_err(DataError::io(path))?;
        if meta.len() == 0 {
            return Ok(Bytes::from(Vec::new()));
        }
        // SAFETY: the mapping is read-only. As with every mapping, a file that another process cuts off while
        // it is read ends this process.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io(path))?;
        let range = 0..map.len();
        Ok(Bytes { all: Arc::new(map), range })
    }

    /// Bytes that something else holds.
    pub(crate) fn of(all: impl AsRef<[u8]> + Send + Sync + 'static) -> Bytes {
        let range = 0..all.as_ref().len();
        Bytes { all: Arc::new(all), range }
    }

    /// A subrange; `None` if it is out of bounds.
    pub(crate) fn part(&self, range: Range<usize>) -> Option<Bytes> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let range = self.range.start + range.start..self.range.start + range.end;
        Some(Bytes { all: Arc::clone(&self.all), range })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.all).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(all: Vec<u8>) -> Bytes {
        Bytes::of(all)
    }
}
