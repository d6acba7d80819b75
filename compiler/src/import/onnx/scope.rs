//! Derives the module path of an ONNX node from exporter metadata.

use super::messages::NodeProto;

/// The scope of a node, such as `transformer.h.0.attn`; empty if nothing is known.
///
/// The dynamo exporter writes `pkg.torch.onnx.name_scopes`, a Python list whose last entry is the
/// operation itself, and `namespace`, the same with classes; the TorchScript exporter names nodes
/// `/transformer/h.0/attn/MatMul`.
pub(super) fn of(node: &NodeProto) -> String {
    let meta = |key: &str| node.metadata_props.iter().find(|e| e.key == key).map(|e| &*e.value);
    if let Some(text) = meta("pkg.torch.onnx.name_scopes") {
        let scopes = python_strings(text);
        if let [.., module, _] = scopes.as_slice() {
            return module.clone();
        }
    }
    if let Some(text) = meta("namespace") {
        let levels: Vec<&str> = text.split('/').collect();
        if let [.., module, _] = levels.as_slice() {
            return module.split(':').next().unwrap_or("").trim().to_string();
        }
    }
    from_name(&node.name)
}

fn from_name(name: &str) -> String {
    let Some(path) = name.strip_prefix('/') else { return String::new() };
    let Some((modules, _)) = path.rsplit_once('/') else { return String::new() };
    let mut scope: Vec<&str> = Vec::new();
    for module in modules.split('/') {
        // A child of a Sequential repeats its parent: `/stem/stem.0/Conv`.
        let repeats = scope.last().is_some_and(|last| {
            module.strip_prefix(last).is_some_and(|rest| rest.starts_with('.'))
        });
        if repeats {
            scope.pop();
        }
        scope.push(module);
    }
    scope.join(".")
}

/// The entries of a Python list of strings, in its own notation.
fn python_strings(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\'' && c != '"' {
            continue;
        }
        let mut entry = String::new();
        while let Some(next) = chars.next() {
            match next {
                '\\' => entry.extend(chars.next()),
                _ if next == c => break,
                _ => entry.push(next),
            }
        }
        found.push(entry);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::messages::StringStringEntryProto;
    use super::*;

    fn scope(name: &str, key: &str, value: &str) -> String {
        let entry = StringStringEntryProto { key: key.into(), value: value.into() };
        of(&NodeProto { name: name.into(), metadata_props: vec![entry], ..Default::default() })
    }

    #[test]
    fn both_exporters_are_understood() {
        let scopes = "['', 'net', 'net.transformer', 'expand']";
        assert_eq!(scope("n", "pkg.torch.onnx.name_scopes", scopes), "net.transformer");
        assert_eq!(scope("n", "pkg.torch.onnx.name_scopes", "['', 'relu']"), "");
        let namespace = ": __main__.A/net: x.B/net.h.0: x.C/expand: aten.expand.default";
        assert_eq!(scope("n", "namespace", namespace), "net.h.0");
        assert_eq!(scope("/transformer/h.0/attn/MatMul", "", ""), "transformer.h.0.attn");
        assert_eq!(scope("/stem/stem.0/Conv", "", ""), "stem.0");
        assert_eq!(scope("/Relu", "", ""), "");
        assert_eq!(scope("Relu_3", "", ""), "");
    }
}
