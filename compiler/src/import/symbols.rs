//! The symbolic dimensions of a model's inputs, before any is bound.

use super::dims::{self, DimError};
use super::json::schema::Model;
use super::mapped;
use super::onnx::UNNAMED_BATCH;
use super::onnx::messages::ModelProto;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The names that `--bind` must give sizes, in the order of the inputs. Empty if the model cannot be read.
pub fn symbols(path: &Path) -> Vec<String> {
    let Ok(bytes) = mapped::map(path) else { return Vec::new() };
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        let model = serde_json::from_slice::<Model>(&bytes);
        let open = |model: Model| model.dims.into_iter().filter(|(_, size)| size.is_none());
        return model.map_or_else(|_| Vec::new(), |m| open(m).map(|(name, _)| name).collect());
    }
    let bytes = super::as_onnx(bytes, path).unwrap_or_default();
    let Some(graph) = ModelProto::decode(bytes).ok().and_then(|model| model.graph) else {
        return Vec::new();
    };
    let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let mut found = Vec::new();
    for input in graph.input.iter().filter(|input| !stored.contains(input.name.as_str())) {
        let ty = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
        let shape = ty.and_then(|t| t.shape.as_ref());
        for (axis, dim) in shape.iter().flat_map(|s| s.dim.iter().enumerate()) {
            let text = match (dim.dim_value, dim.dim_param.as_deref()) {
                (Some(0..), _) => continue,
                (_, Some(text)) if !text.is_empty() => text,
                _ if axis == 0 => UNNAMED_BATCH,
                _ => continue,
            };
            let new = names(text).into_iter().filter(|name| !found.contains(name));
            found.extend(new.collect::<Vec<_>>());
        }
    }
    found
}

/// The names of a size expression, or the text itself if it is none.
fn names(text: &str) -> Vec<String> {
    let (mut binds, mut names) = (BTreeMap::new(), Vec::new());
    loop {
        match dims::evaluate(text, &binds, &mut BTreeSet::new()) {
            Err(DimError::Unbound(name)) => {
                binds.insert(name.clone(), 1);
                names.push(name);
            }
            Err(DimError::Syntax(_)) if !text.trim().is_empty() => {
                return vec![text.trim().to_string()];
            }
            _ => return names,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn names_of_expressions() {
        for (text, expected) in [
            ("batch", &["batch"][..]),
            ("2*(width + 1)*batch", &["width", "batch"]),
            ("s/4 + s", &["s"]),
            ("MatMul logits-dim", &["MatMul logits-dim"]),
            ("7", &[]),
        ] {
            assert_eq!(names(text), expected, "{text}");
        }
    }
}
