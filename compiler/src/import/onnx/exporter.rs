//! What the dynamo exporter tells about a node beyond ONNX: `pkg.torch.onnx.fx_node` holds the call of
//! PyTorch's operation, such as
//! `%e : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = (%w, %ids, 0), …)`.

use super::messages::NodeProto;

const CALL: &str = "pkg.torch.onnx.fx_node";

/// The row of `torch.nn.Embedding` that gets no gradient, which ONNX's Gather has no attribute for.
pub(super) fn padding_idx(node: &NodeProto) -> Option<usize> {
    let call = &node.metadata_props.iter().find(|e| e.key == CALL)?.value;
    let (_, arguments) = call.split_once("aten.embedding.default](args = (")?;
    let (positional, _) = arguments.split_once(')')?;
    // The third of `weight, indices, padding_idx, …`; −1 means none.
    positional.split(',').nth(2)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::messages::StringStringEntryProto;
    use super::*;

    #[test]
    fn the_padding_row_is_read_from_the_call() {
        let of = |target: &str, arguments: &str| {
            let value = format!(
                "%e : [num_users=1] = call_function[target=torch.ops.{target}]({arguments}, \
                 kwargs = {{}})"
            );
            let entry = StringStringEntryProto { key: CALL.into(), value };
            padding_idx(&NodeProto { metadata_props: vec![entry], ..Default::default() })
        };
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids, 3)"), Some(3));
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids, -1)"), None);
        assert_eq!(of("aten.embedding.default", "args = (%w, %ids)"), None);
        assert_eq!(of("aten.index_select.default", "args = (%w, 0, 3)"), None);
    }
}
