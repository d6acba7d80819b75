//! Weights that a model holds as constants, which do not train: results of `Constant` nodes, and initializers of graphs inside nodes.

use super::messages::{GraphProto, NodeProto, TensorProto};
use super::tensor::is_float;
use frit_ir::{Code, Diagnostic};
use std::collections::{BTreeMap, HashMap};

/// Weights that the warning lists at most.
const MAX_LISTED: usize = 8;
/// Views between a constant and its reader at most.
const MAX_VIEWS: usize = 4;

/// Operators whose result is the same tensor in another layout or dtype.
const VIEWS: &[&str] =
    &["Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"];

/// Warns of matrices, and tensors of more axes, that are weights of matmuls, convolutions and recurrent layers.
pub(super) fn warning(graph: &GraphProto) -> Option<Diagnostic> {
    let mut found = Found::default();
    found.graph(graph, false);
    let weights = found.weights();
    let first = weights.keys().next()?;
    let message = match weights.len() {
        1 => format!("the weight `{first}` is a constant and does not train"),
        n => format!("`{first}` and {} other weights are constants and do not train", n - 1),
    };
    let mut warning = Diagnostic::warning(Code::WeightsAreConstants, message).help(
        "to train them, store them as initializers of the model: \
         `onnx_ir.passes.common` has LiftConstantsToInitializersPass and \
         LiftSubgraphInitializersToMainGraphPass",
    );
    for what in weights.into_values().take(MAX_LISTED) {
        warning = warning.note(what);
    }
    Some(warning)
}

/// The operands of a node that are weights.
fn weights(node: &NodeProto) -> &[String] {
    let operands = match node.op_type.as_str() {
        "MatMul" => 0..2,
        "Gemm" | "Conv" | "ConvTranspose" => 1..2,
        "LSTM" | "GRU" | "RNN" => 1..3,
        _ => 0..0,
    };
    let end = operands.end.min(node.input.len());
    node.input.get(operands.start..end).unwrap_or(&[])
}

#[derive(Default)]
struct Found<'a> {
    /// Constants by name.
    constants: HashMap<&'a str, &'a TensorProto>,
    /// Operands of views, by the view's name.
    views: HashMap<&'a str, &'a str>,
    /// Operands that are weights.
    uses: Vec<(&'a str, &'a NodeProto)>,
}

impl<'a> Found<'a> {
    fn graph(&mut self, graph: &'a GraphProto, is_inside: bool) {
        if is_inside {
            self.constants.extend(graph.initializer.iter().map(|t| (t.name.as_str(), t)));
        }
        for node in &graph.node {
            self.uses.extend(weights(node).iter().map(|name| (name.as_str(), node)));
            for attribute in &node.attribute {
                if let Some(inside) = &attribute.g {
                    self.graph(inside, true);
                }
            }
            let Some(output) = node.output.first() else { continue };
            if node.op_type == "Constant" {
                let values = node.attribute.iter().filter_map(|a| a.t.as_deref());
                self.constants.extend(values.map(|value| (output.as_str(), value)));
            } else if VIEWS.contains(&node.op_type.as_str()) {
                let operands = node.input.iter().take(1);
                self.views.extend(operands.map(|operand| (output.as_str(), operand.as_str())));
            }
        }
    }

    /// Each weight that is a constant, with its shape and the node that reads it.
    fn weights(&self) -> BTreeMap<&'a str, String> {
        let mut weights = BTreeMap::new();
        for &(mut name, node) in &self.uses {
            for _ in 0..MAX_VIEWS {
                name = self.views.get(name).copied().unwrap_or(name);
            }
            let Some(constant) = self.constants.get(name) else { continue };
            let is_matrix = constant.dims.iter().filter(|n| **n > 1).count() > 1;
            if is_matrix && is_float(constant.data_type) {
                let of = format!("{} `{}`", node.op_type, node.name);
                weights.insert(name, format!("{name} {:?}, of {of}", constant.dims));
            }
        }
        weights
    }
}
