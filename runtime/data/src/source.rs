//! Resolves the data files and patterns of the command line.

use super::formats::TokenDType;
use crate::DataError;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// Files of examples, in sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Paths and patterns.
    pub files: Vec<PathBuf>,
    /// The type of the tokens in `.bin` files without a header.
    pub tokens: Option<TokenDType>,
}

impl Source {
    /// Files, and the type of tokens in those without a header.
    pub fn new(files: Vec<PathBuf>, tokens: Option<TokenDType>) -> Source {
        Source { files, tokens }
    }

    /// The files: in the order in which they are given, those of a pattern sorted by name.
    ///
    /// # Errors
    /// If a pattern is invalid, or matches no file.
    pub fn paths(&self) -> Result<Vec<PathBuf>, DataError> {
        let mut paths = Vec::new();
        for given in &self.files {
            let text = given.to_string_lossy();
            if !given.exists() && !text.contains(['*', '?', '[']) {
                return Err(DataError::content(given, "there is no such file"));
            }
            if given.is_dir() {
                paths.extend(in_folder(given)?);
                continue;
            }
            paths.extend(matching(given).map_err(|reason| DataError::content(given, reason))?);
        }
        if paths.is_empty() {
            return Err(DataError::content(Path::new("--data"), "names no file"));
        }
        Ok(paths)
    }
}

/// The files that a path or pattern names: itself, or those that match, sorted by name.
///
/// # Errors
/// If the pattern is invalid, or matches no file.
pub fn matching(given: &Path) -> Result<Vec<PathBuf>, String> {
    let text = given.to_string_lossy();
    if given.exists() || !text.contains(['*', '?', '[']) {
        return Ok(vec![given.into()]);
    }
    let mut files = Vec::new();
    for path in glob::glob(&text).map_err(|e| format!("invalid pattern: {e}"))? {
        let path = path.map_err(|e| e.to_string())?;
        files.extend(path.is_file().then_some(path));
    }
    if files.is_empty() { Err("no file matches this pattern".into()) } else { Ok(files) }
}

/// Extensions of files that have all inputs.
const WHOLE: [&str; 4] = ["safetensors", "parquet", "npz", "bin"];

/// The data files of a folder and those within it, sorted by path; or the folder itself, if it has one `.npy` per input.
fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let (mut files, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    let mut kinds = BTreeSet::new();
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next).map_err(DataError::io(&next))? {
            let path = entry.map_err(DataError::io(&next))?.path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
            if WHOLE.contains(&extension.as_str()) || extension == "npy" {
                files.push(path);
                kinds.insert(extension);
            }
        }
    }
    files.sort();
    let holds = |kind: &str| {
        files.iter().any(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with(kind)))
    };
    if holds("train") && holds("validation") {
        let reason = "the folder has files for training and for validation; use patterns, such as 'FOLDER/train*' and \
                      'FOLDER/validation*'";
        return Err(DataError::content(folder, reason));
    }
    match kinds.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["npy"] => Ok(vec![folder.into()]),
        [_] => Ok(files),
        [] => {
            let reason = format!("the folder has no .{} or .npy file", WHOLE.join(", ."));
            Err(DataError::content(folder, reason))
        }
        [a, b, ..] => {
            let reason =
                format!("the folder has .{a} and .{b} files; use a pattern, such as '*.{a}'");
            Err(DataError::content(folder, reason))
        }
    }
}

impl<P: Into<PathBuf>> From<P> for Source {
    fn from(path: P) -> Source {
        Source { files: vec![path.into()], tokens: None }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.files.iter().map(|p| p.display().to_string()).collect();
        f.write_str(&names.join(" "))
    }
}
