//! Writes the files of an exported model under temporary names and renames them; large tensors are streamed.

use super::message::{Message, Piece};
use super::trained::Trained;
use frit_ir::{Code, Diagnostic};
use frit_runtime::files::{self, Sink};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Tensors in a file of their own begin at multiples of this many bytes, so that it can be mapped.
const ALIGNMENT: u64 = 4096;

/// Tensors that lie in a file beside the model.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Name of the file.
    pub(super) file: String,
    tensors: Vec<(u64, Piece)>,
    len: u64,
}

impl Beside {
    pub(super) fn new(file: String) -> Beside {
        Beside { file, ..Beside::default() }
    }

    /// Adds a tensor; where it begins.
    pub(super) fn put(&mut self, tensor: Piece) -> u64 {
        let at = self.len.next_multiple_of(ALIGNMENT);
        self.len = at + tensor.len();
        self.tensors.push((at, tensor));
        at
    }
}

/// Writes the model and what lies beside it; none of them if anything fails.
pub(super) fn write(
    path: &Path,
    model: &Message,
    beside: Option<&Beside>,
    trained: &Trained,
) -> Result<Vec<PathBuf>, Diagnostic> {
    let aside = |path: &Path| {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".partial-{}", std::process::id()));
        path.with_file_name(name)
    };
    let mut files = Vec::new();
    let mut all = || -> Result<(), Diagnostic> {
        if let Some(beside) = beside.filter(|b| !b.tensors.is_empty()) {
            let path = path.with_file_name(&beside.file);
            files.push(path.clone());
            tensors(&aside(&path), &beside.tensors, trained)?;
        }
        files.push(path.into());
        let pieces = model.pieces().iter().map(|p| (None, p));
        put(&aside(path), pieces, trained)
    };
    let mut done = all();
    for file in &files {
        done = done.and_then(|()| files::rename(&aside(file), file).map_err(|e| refuse(file, &e)));
    }
    if let Err(e) = done {
        for file in &files {
            // There may be nothing to remove.
            let _ = files::remove(&aside(file));
        }
        return Err(e);
    }
    Ok(files)
}

fn refuse(path: &Path, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {e}", path.display()))
}

fn tensors(path: &Path, tensors: &[(u64, Piece)], trained: &Trained) -> Result<(), Diagnostic> {
    put(path, tensors.iter().map(|(at, piece)| (Some(*at), piece)), trained)
}

/// Writes the pieces, each where it is to begin, with zeros in between.
fn put<'p>(
    path: &Path,
    pieces: impl Iterator<Item = (Option<u64>, &'p Piece)>,
    trained: &Trained,
) -> Result<(), Diagnostic> {
    let refuse = |e: std::io::Error| refuse(path, &e);
    let mut out = BufWriter::new(Sink::create(path).map_err(refuse)?);
    let mut written = 0;
    for (at, piece) in pieces {
        let gap = at.map_or(0, |at| at - written);
        out.write_all(&vec![0; gap as usize]).map_err(refuse)?;
        match piece {
            Piece::Bytes(bytes) => out.write_all(bytes),
            Piece::Elements(elements) => out.write_all(&trained.elements(elements)?),
        }
        .map_err(refuse)?;
        written += gap + piece.len();
    }
    out.flush().map_err(refuse)
}
