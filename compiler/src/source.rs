//! What a plan keeps of its model: `source/model.onnx` without tensor data over 1 KB (or `model.json` as it
//! is), `source/train.toml`, and `source/origin.json` with the path, the digest, the binds,
//! and which initializers are copies of a parameter.

use crate::import::Tied;
use crate::wire;
use frit_ir::Diagnostic;
use frit_ir::plan::sha256_hex;
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Larger fields of a tensor are left out.
const LARGEST: usize = 1024;

/// The model and where it came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// File name within `source/`.
    pub file: String,
    /// Its contents.
    pub model: Vec<u8>,
    /// `origin.json`.
    pub origin: String,
}

impl Source {
    /// Reads the model file again and strips it.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn of(
        path: &Path,
        binds: &BTreeMap<String, usize>,
        ties: &BTreeMap<String, Tied>,
    ) -> Result<Source, Diagnostic> {
        let bytes = std::fs::read(path).map_err(|e| {
            Diagnostic::error("E010", format!("cannot read the model {}: {e}", path.display()))
        })?;
        let origin = json!({
            "path": std::path::absolute(path).unwrap_or_else(|_| path.into()),
            "sha256": sha256_hex(&bytes),
            "binds": binds,
            "ties": ties,
        });
        let is_json = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
        let (file, model) = if is_json {
            ("model.json", bytes)
        } else {
            ("model.onnx", strip(&bytes, Message::Model).unwrap_or(bytes))
        };
        Ok(Source { file: file.into(), model, origin: format!("{origin:#}\n") })
    }
}

/// What `source/origin.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Origin {
    /// The model file.
    pub path: PathBuf,
    /// Its digest.
    pub sha256: String,
    /// Values of symbolic dimensions.
    pub binds: BTreeMap<String, usize>,
    /// Initializers that are copies of a parameter.
    pub ties: BTreeMap<String, Tied>,
}

impl Origin {
    /// Reads it from the folder `source` of a plan or checkpoint.
    ///
    /// # Errors
    /// If it is not there, or not readable.
    pub fn read(source: &Path) -> Result<Origin, Diagnostic> {
        let file = source.join("origin.json");
        let refuse = |e: String| Diagnostic::error("E112", format!("{}: {e}", file.display()));
        let text = std::fs::read_to_string(&file).map_err(|e| refuse(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))
    }

    /// The file to compile the model from again: the original, or the copy of a JSON model, which is
    /// whole.
    ///
    /// # Errors
    /// If the original is gone, or was changed since.
    pub fn model(&self, source: &Path) -> Result<PathBuf, Diagnostic> {
        let copy = source.join("model.json");
        if copy.exists() {
            return Ok(copy);
        }
        let refuse = |e: String| {
            Diagnostic::error("E112", format!("{}: {e}", self.path.display()))
                .help("put the model back, or compile the plan again")
        };
        let bytes = std::fs::read(&self.path).map_err(|e| refuse(e.to_string()))?;
        if sha256_hex(&bytes) != self.sha256 {
            return Err(refuse("was changed since the plan was compiled".into()));
        }
        Ok(self.path.clone())
    }
}

/// The messages of ONNX on the way to its tensors.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
}

impl Message {
    /// The message in a field, if it may hold a tensor. Source: the field numbers of onnx.proto.
    fn inside(self, field: u64) -> Option<Message> {
        match (self, field) {
            (Message::Model, 7) => Some(Message::Graph),
            (Message::Graph, 1) => Some(Message::Node),
            (Message::Graph, 5) => Some(Message::Tensor),
            (Message::Node, 5) => Some(Message::Attribute),
            (Message::Attribute, 5 | 10) => Some(Message::Tensor),
            (Message::Attribute, 6 | 11) => Some(Message::Graph),
            _ => None,
        }
    }
}

/// The message with the large fields of its tensors left out; `None` if the bytes are no message.
fn strip(bytes: &[u8], message: Message) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len().min(1 << 20));
    for field in wire::fields(bytes)? {
        match (field.content, message.inside(field.number)) {
            (Some(content), Some(inner)) => {
                wire::put(&mut out, field.number, &strip(content, inner)?)
            }
            // All data of a tensor is length-delimited; its sizes are field 1 and its name 8.
            (Some(content), None)
                if message == Message::Tensor
                    && content.len() > LARGEST
                    && !matches!(field.number, 1 | 8) => {}
            _ => out.extend_from_slice(field.whole),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u64, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put(&mut out, number, content);
        out
    }

    #[test]
    fn large_data_goes_and_everything_else_stays() {
        let tensor = |n: usize| [field(8, b"w"), field(9, &vec![7; n])].concat();
        let graph =
            |n: usize| [field(2, b"g"), field(5, &tensor(n)), field(5, &tensor(8))].concat();
        let model = |n: usize| field(7, &graph(n));
        assert_eq!(strip(&model(LARGEST), Message::Model), Some(model(LARGEST)));
        let stripped = strip(&model(5000), Message::Model).expect("a message");
        assert_eq!(stripped, {
            let small = [field(8, b"w")].concat();
            field(7, &[field(2, b"g"), field(5, &small), field(5, &tensor(8))].concat())
        });
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(strip(&[0xff; 30], Message::Model), None);
        assert_eq!(strip(&field(7, b"abc")[..3], Message::Model), None);
    }
}
