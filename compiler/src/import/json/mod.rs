//! Importer for JSON models: Frit's own operations, with repeated blocks and generated weights.
//!
//! In: the text of a model as `docs/json-model.md` describes it. Out: its graph; there are no stored weights, every parameter
//! has its `init`. Errors give line, column and path.

mod call;
mod expand;
mod locate;
pub mod schema;

use super::{ImportOptions, Imported};
use crate::diagnostics::Report;
use crate::weights::Weights;
use frit_ir::{Code, Diagnostic};
use locate::Path;
use schema::Model;

/// A place in the text, for messages.
#[derive(Clone, Copy)]
struct Source<'a> {
    text: &'a str,
    name: &'a str,
}

impl Source<'_> {
    /// `model.json:14:9: nodes[1].op: ` for the value at a path.
    fn place(&self, path: &Path) -> String {
        let (line, column) = locate::position(self.text, path);
        let colon = if path.is_root() { "" } else { ": " };
        format!("{}:{line}:{column}: {path}{colon}", self.name)
    }
}

/// Reads a model; `name` is what messages call the file.
///
/// # Errors
/// Everything that is wrong with the model, as far as it could be found at once.
pub fn import(bytes: &[u8], name: &str, options: &ImportOptions) -> Result<Imported, Report> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        Diagnostic::error(Code::NotAJsonModel, format!("{name}: not JSON: {e}"))
            .help("JSON models are UTF-8; give ONNX models another extension than .json")
    })?;
    let source = Source { text, name };
    let model: Model = serde_json::from_str(text).map_err(|e| {
        let (line, column) = (e.line(), e.column());
        let path = locate::path_at(text, line, column);
        let colon = if path.is_root() { "" } else { ": " };
        // serde appends the place; it is at the front already.
        let message = e.to_string();
        let message = message.split(" at line ").next().unwrap_or(&message);
        Diagnostic::error(
            Code::NotAJsonModel,
            format!("{name}:{line}:{column}: {path}{colon}{message}"),
        )
        .help("docs/json-model.md describes the format")
    })?;
    let graph = expand::graph(&model, source, options)?;
    Ok(Imported {
        graph,
        weights: Weights::default(),
        inlined: Vec::new(),
        ties: Default::default(),
        warnings: vec![],
    })
}

/// The JSON Schema of models, generated from the types that read them.
pub fn json_schema() -> String {
    let schema = schemars::schema_for!(Model);
    let mut text = serde_json::to_string_pretty(&schema).expect("invariant: a schema is JSON");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
