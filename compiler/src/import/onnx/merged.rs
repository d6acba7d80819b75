//! Restores parameters that the TorchScript exporter merged because their initial values are equal.
//!
//! For a module in inference mode (`training=TrainingMode.EVAL`, the default) it stores initializers with equal values once: all
//! zero biases of one length, all norm weights of one. The others become `Identity(first)` under their own names. Parameters
//! tied in PyTorch have one name and no such node, so each such node becomes a separate initializer.

use super::from_pytorch;
use super::messages::{GraphProto, ModelProto, NodeProto, TensorProto};
use super::tensor::is_float;
use super::trainable::{is_from_module, listed};
use crate::import::limits::{Budget, Resource};
use frit_ir::{Diagnostic, Origin};
use prost::Message;
use std::collections::{HashMap, HashSet};

/// Gives each of them an initializer.
///
/// # Errors
/// If the copies of their values are more than the import may make.
pub(super) fn separate(
    model: &ModelProto,
    graph: &mut GraphProto,
    budget: &mut Budget,
) -> Result<(), Diagnostic> {
    let pairs = pairs(model, graph);
    let names: HashSet<&str> = pairs.iter().map(|(name, _)| name.as_str()).collect();
    graph.node.retain(|n| !n.output.iter().any(|o| names.contains(o.as_str())));
    let stored: HashMap<&str, &TensorProto> =
        graph.initializer.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut copies = Vec::with_capacity(pairs.len());
    for (name, source) in &pairs {
        let Some(&tensor) = stored.get(source.as_str()) else { continue };
        // Raw data are shared.
        let bytes = tensor.encoded_len() - tensor.raw_data.as_ref().map_or(0, |raw| raw.len());
        let charged = budget.charge(Resource::Bytes, bytes as u64);
        charged.map_err(|e| e.diagnostic("Identity", &Origin::new(name, "")))?;
        copies.push(TensorProto { name: name.clone(), ..tensor.clone() });
    }
    graph.initializer.extend(copies);
    Ok(())
}

/// Name of each of them, and of the initializer that holds its values.
pub(super) fn pairs(model: &ModelProto, graph: &GraphProto) -> Vec<(String, String)> {
    if !from_pytorch(model) || !listed(graph, "PARAMETER").is_empty() {
        return Vec::new();
    }
    let float = |t: &&TensorProto| is_float(t.data_type);
    let stored: HashSet<&str> =
        graph.initializer.iter().filter(float).map(|t| t.name.as_str()).collect();
    let outputs: HashSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    let pair = |node: &NodeProto| match (node.op_type.as_str(), &node.input[..], &node.output[..]) {
        ("Identity", [source], [name])
            if stored.contains(source.as_str())
                && is_from_module(source)
                && is_from_module(name)
                && !outputs.contains(name.as_str()) =>
        {
            Some((name.clone(), source.clone()))
        }
        _ => None,
    };
    graph.node.iter().filter_map(pair).collect()
}
