//! Module paths of calls, from the stack of modules that PyTorch records.

/// The key of a node's metadata, as PyTorch's exporter calls it.
pub(super) const KEY: &str = "pkg.torch.onnx.name_scopes";

/// The paths of the modules around a call, from the outermost: of `L__self__,,m.M;L__self___h,h.0,m.H`, ``, `h.0`.
fn paths(stack: &str) -> impl Iterator<Item = &str> {
    // A module that is called a second time has `@1` behind its path.
    stack
        .split(';')
        .filter_map(|level| level.split(',').nth(1))
        .map(|p| p.split('@').next().unwrap_or(p))
}

/// The path of the innermost module.
pub(super) fn module(stack: &str) -> String {
    paths(stack).last().unwrap_or("").into()
}

/// The paths and the call's own name, in the notation of PyTorch's exporter.
pub(super) fn entry(stack: &str, name: &str) -> String {
    let mut levels: Vec<&str> = paths(stack).collect();
    if levels.is_empty() {
        levels.push("");
    }
    levels.push(name);
    let quoted: Vec<String> = levels
        .iter()
        .map(|l| format!("'{}'", l.replace('\\', "\\\\").replace('\'', "\\'")))
        .collect();
    format!("[{}]", quoted.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_module_is_the_scope() {
        let stack =
            "L__self__,,__main__.M;L__self___h_0,h.0,m.Block;L__self___h_0_ln@1,h.0.ln@1,m.Norm";
        assert_eq!(module(stack), "h.0.ln");
        assert_eq!(entry(stack, "add_1"), "['', 'h.0', 'h.0.ln', 'add_1']");
        assert_eq!((module("").as_str(), entry("", "add").as_str()), ("", "['', 'add']"));
    }
}
