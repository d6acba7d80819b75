//! Resolves the data files and patterns of the command line.

use super::formats::TokenDType;
use crate::RunError;
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
    pub(crate) fn paths(&self) -> Result<Vec<PathBuf>, RunError> {
        let mut paths = Vec::new();
        for given in &self.files {
            let text = given.to_string_lossy();
            if given.exists() || !text.contains(['*', '?', '[']) {
                paths.push(given.clone());
                continue;
            }
            let refuse = |reason: String| RunError::data(given, reason);
            let matching =
                glob::glob(&text).map_err(|e| refuse(format!("invalid pattern: {e}")))?;
            let before = paths.len();
            for path in matching {
                let path = path.map_err(|e| refuse(e.to_string()))?;
                if path.is_file() {
                    paths.push(path);
                }
            }
            if paths.len() == before {
                return Err(refuse("no file matches this pattern".into()));
            }
        }
        if paths.is_empty() {
            return Err(RunError::data(Path::new("--data"), "names no file"));
        }
        Ok(paths)
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
