//! Decides which initializers train, and records why.
//!
//! Rules in order: `params.ignored` and `params.frozen`; the exporter's signature (written into the graph's metadata by the dynamo
//! exporter); BatchNormalization statistics; scalars that are not tensors of a PyTorch module; values that reach the outputs only through
//! sines and cosines of data-independent values (rotary tables) or through a normalization by stored statistics, or not at all; weights
//! of classes; masks added to scores; tables of sines and cosines; rows of zeros added to the output. All other floats train if
//! `params.trainable` matches their name.

use super::exporter;
use super::frozen::of_stored_variances;
use super::masks;
use super::messages::{AttributeProto, GraphProto, NodeProto};
use super::subgraph::operands;
use super::table;
use super::tensor::{Stored, is_float};
use crate::import::ImportOptions;
use frit_ir::TensorType;
use frit_ir::ops::ParamKind;
use frit_ir::pattern;
use std::collections::{HashMap, HashSet};

const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";

/// Operators whose results carry no gradient to any operand.
const NOT_DIFFERENTIABLE: &[&str] = &[
    "And",
    "ArgMax",
    "ArgMin",
    "Ceil",
    "ConstantOfShape",
    "Equal",
    "EyeLike",
    "Floor",
    "Greater",
    "GreaterOrEqual",
    "IsInf",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "NonZero",
    "Not",
    "OneHot",
    "Or",
    "Range",
    "Round",
    "Shape",
    "Sign",
    "Size",
    "Xor",
];

/// Whether a BatchNormalization uses the statistics of its batch; before opset 14 further outputs say so.
pub(super) fn batch_norm_trains(node: &NodeProto) -> bool {
    let set = |a: &AttributeProto| a.name == "training_mode" && a.i != 0;
    node.attribute.iter().any(set) || node.output.iter().skip(1).any(|name| !name.is_empty())
}

/// Facts about a model that decide what trains.
pub(super) struct Trainable<'a> {
    options: &'a ImportOptions,
    /// Whether PyTorch's TorchScript exporter wrote the model: it states no signature.
    from_torchscript: bool,
    /// The exporter's kind of each tensor, such as `PARAMETER` or `BUFFER`.
    signature: HashMap<String, String>,
    /// Whether parameters of the signature are in the graph under no known name, so that what the signature does not list may be made
    /// of them.
    lacks_parameters: bool,
    /// Whether the module trains a parameter, where the signature says so.
    requires_grad: HashMap<String, bool>,
    statistics: HashSet<&'a str>,
    /// Weights of classes in losses of the model.
    class_weights: HashSet<&'a str>,
    /// Those of the statistics that every step renews.
    renewed: HashSet<&'a str>,
    /// Right operands of matmuls and weights of convolutions.
    weights: HashSet<&'a str>,
    /// Biases of convolutions, which a batch normalization may have been folded into.
    biases: HashSet<&'a str>,
    /// What Gather reads rows of.
    tables: HashSet<&'a str>,
    /// Operands of additions whose result is an output.
    offsets: HashSet<&'a str>,
    /// Names from which a gradient path leads to an output.
    reaching: HashSet<&'a str>,
    /// The same, over paths that avoid sines and cosines of data-independent values.
    reaching_directly: HashSet<&'a str>,
    /// The same, over paths that avoid values computed only from stored statistics.
    reaching_unfrozen: HashSet<&'a str>,
}

impl<'a> Trainable<'a> {
    /// Gathers the facts; `nodes` in topological order, `from_pytorch` if PyTorch wrote the model, `restored` the parameters that are
    /// stored under other names.
    pub(super) fn new(
        graph: &'a GraphProto,
        nodes: &[&'a NodeProto],
        data: &HashSet<&str>,
        (from_pytorch, restored): (bool, &HashSet<String>),
        options: &'a ImportOptions,
    ) -> Self {
        let text = graph.metadata_props.iter().find(|e| e.key == SIGNATURE);
        let signature = text.map_or_else(HashMap::new, |e| read_signature(&e.value));
        let requires_grad = text.map_or_else(HashMap::new, |e| read_requires_grad(&e.value));
        let stored: HashSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        let lacks_parameters = signature.iter().any(|(name, kind)| {
            kind == "PARAMETER" && !stored.contains(name.as_str()) && !restored.contains(name)
        });
        let copied = copied(nodes);
        // A module that is called again reads what the call before left, which the exporter writes as a copy.
        let source_of = |name: &'a String| {
            let mut name = name.as_str();
            while let Some(source) = copied.get(name) {
                name = source;
            }
            name
        };
        // A parameter with the same first values may be stored in the place of a statistic.
        let is_statistic =
            |name: &&str| signature.get(*name).is_none_or(|kind| kind != "PARAMETER");
        let statistics = nodes
            .iter()
            .filter(|n| n.op_type == "BatchNormalization")
            .flat_map(|n| n.input.iter().skip(3).map(source_of))
            .filter(is_statistic)
            .collect();
        let class_weights = nodes
            .iter()
            .filter(|n| {
                let op = n.op_type.as_str();
                matches!(op, "SoftmaxCrossEntropyLoss" | "NegativeLogLikelihoodLoss")
            })
            .filter_map(|n| n.input.get(2).map(source_of))
            .collect();
        let trains = |n: &&&'a NodeProto| options.batch_norm_trains || batch_norm_trains(n);
        let renewed = nodes
            .iter()
            .filter(|n| n.op_type == "BatchNormalization")
            .filter(trains)
            .flat_map(|n| n.input.iter().skip(3).map(source_of))
            .filter(is_statistic)
            .collect();
        let mut from_data: HashSet<&str> = data.clone();
        for node in nodes {
            // A shape is known at import: it carries nothing of the data.
            let sees = !matches!(node.op_type.as_str(), "Shape" | "Size")
                && operands(node).iter().any(|i| from_data.contains(i));
            if sees {
                from_data.extend(node.output.iter().map(String::as_str));
            }
        }
        let is_table = |node: &NodeProto| {
            matches!(node.op_type.as_str(), "Sin" | "Cos")
                && !node.input.iter().any(|i| from_data.contains(i.as_str()))
        };
        let frozen = of_stored_variances(graph, nodes, &from_data);
        let is_frozen = |node: &NodeProto| node.output.iter().any(|o| frozen.contains(o.as_str()));
        let operands = |node: &&'a NodeProto| node.input.iter().map(String::as_str);
        let first = |node: &&'a NodeProto| node.input.first().map(String::as_str);
        let outputs: HashSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
        let is_output =
            |node: &&&'a NodeProto| node.output.iter().any(|o| outputs.contains(o.as_str()));
        Trainable {
            options,
            from_torchscript: from_pytorch && signature.is_empty(),
            signature,
            lacks_parameters,
            requires_grad,
            statistics,
            class_weights,
            renewed,
            weights: nodes
                .iter()
                .filter(|n| matches!(n.op_type.as_str(), "MatMul" | "Gemm" | "Conv"))
                .filter_map(|n| n.input.get(1).map(String::as_str))
                .collect(),
            biases: nodes
                .iter()
                .filter(|n| matches!(n.op_type.as_str(), "Conv" | "ConvTranspose"))
                .filter_map(|n| n.input.get(2).map(String::as_str))
                .collect(),
            tables: nodes.iter().filter(|n| n.op_type == "Gather").filter_map(first).collect(),
            offsets: nodes
                .iter()
                .filter(|n| n.op_type == "Add")
                .filter(is_output)
                .flat_map(operands)
                .map(|name| copied.get(name).copied().unwrap_or(name))
                .collect(),
            reaching: reaching(graph, nodes, |_| false),
            reaching_directly: reaching(graph, nodes, is_table),
            reaching_unfrozen: reaching(graph, nodes, is_frozen),
        }
    }

    /// What happens to a float initializer, and why, as a sentence.
    ///
    /// `place` is the initializer that holds it.
    pub(super) fn decide(&self, name: &str, place: &str, stored: &Stored) -> (ParamKind, String) {
        let ty = &stored.ty;
        use ParamKind::{Buffer, Frozen, Trainable};
        let said = self.signature.get(name).map(String::as_str);
        let (kind, reason) = if pattern::any(&self.options.ignored, name) {
            (Buffer, "`params.ignored` matches its name".to_string())
        } else if pattern::any(&self.options.frozen, name) {
            (Frozen, "`params.frozen` matches its name".to_string())
        } else if let Some(kind) = said.filter(|k| *k != "PARAMETER") {
            (Buffer, format!("the exporter lists it as {}", kind.to_lowercase().replace('_', " ")))
        } else if self.requires_grad.get(name) == Some(&false) {
            (Frozen, "the module does not train it (requires_grad = False)".into())
        } else if self.statistics.contains(name) || self.is_named_statistic(name) {
            (Buffer, "it is a running statistic of BatchNormalization".into())
        } else if said.is_none() && self.class_weights.contains(name) {
            (Buffer, "it weights the classes of a loss".into())
        } else if said.is_none() && ty.shape.rank() == 0 && !self.is_module_tensor(name) {
            (Buffer, "it is a scalar constant".into())
        } else if !self.reaching.contains(place) && self.is_parameter(name, ty) {
            // Differentiation determines whether there is a gradient, and warns.
            match pattern::any(&self.options.trainable, name) {
                true => (Trainable, "it is a parameter of the module".into()),
                false => (Frozen, "`params.trainable` does not match its name".into()),
            }
        } else if !self.reaching.contains(place) {
            (Buffer, "no gradient path leads from it to an output".into())
        } else if said.is_none() && !self.reaching_directly.contains(place) {
            let why = "it reaches the outputs only through sines and cosines of values that do not \
                       depend on data";
            (Buffer, why.into())
        } else if said.is_none() && !self.reaching_unfrozen.contains(place) {
            let why = "it reaches the outputs only through a normalization by statistics that the \
                       model stores";
            (Buffer, why.into())
        } else if said.is_none() && !self.signature.is_empty() && !self.is_folded_weight(name) {
            let why = "the exporter does not list it: it was computed from constants";
            (Buffer, why.into())
        } else if said.is_none() && masks::is_saturated(stored) {
            (
                Buffer,
                "its elements are 0 or one large negative number: a mask that is added to \
                 scores"
                    .into(),
            )
        } else if !self.requires_grad.contains_key(name) && table::is_sinusoidal(stored) {
            (Buffer, "its rows are the sines and cosines of their positions".into())
        } else if said.is_none() && self.is_output_offset(name, stored) {
            let why = "it is a row of zeros, not a vector, added to an output: a buffer that \
                       excludes classes";
            (Buffer, why.into())
        } else if !pattern::any(&self.options.trainable, name) {
            (Frozen, "`params.trainable` does not match its name".into())
        } else if said.is_some() {
            (Trainable, "the exporter lists it as a parameter".into())
        } else {
            (Trainable, "it is a float that reaches the outputs".into())
        };
        (kind, format!("{reason}."))
    }
}

impl Trainable<'_> {
    /// Whether every step gives the initializer a new value.
    pub(super) fn is_renewed(&self, name: &str) -> bool {
        self.renewed.contains(name)
    }

    /// Whether a gradient path leads from a value to an output.
    pub(super) fn is_reaching(&self, name: &str) -> bool {
        self.reaching.contains(name)
    }

    /// Whether the module has a tensor that might be trained, from which no gradient path leads to an output. Those
    /// that are known for parameters are found when the graph is differentiated.
    pub(super) fn is_unreached(&self, name: &str, ty: &TensorType) -> bool {
        let chosen = [&self.options.ignored, &self.options.frozen].map(|p| pattern::any(p, name));
        self.is_module_tensor(name)
            && !self.reaching.contains(name)
            && ty.shape.numel() > 1
            && !self.is_parameter(name, ty)
            && !self.statistics.contains(name)
            && !self.is_named_statistic(name)
            && chosen == [false; 2]
    }

    /// Whether the graph holds float tensors that the exporter's list of them does not.
    pub(super) fn has_folded(&self, graph: &GraphProto) -> bool {
        graph.initializer.iter().any(|t| {
            is_float(t.data_type) && !t.dims.is_empty() && !self.signature.contains_key(&t.name)
        })
    }

    /// Whether rows of it are looked up.
    pub(super) fn is_table(&self, name: &str) -> bool {
        self.tables.contains(name)
    }

    /// Whether it is the right operand of a matmul.
    pub(super) fn is_weight(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    /// The padding row of a table that the exporter says nothing about, by its values.
    pub(super) fn padding_row(&self, name: &str, stored: &Stored) -> Option<usize> {
        let looked_up = self.signature.is_empty() && self.tables.contains(name);
        looked_up.then(|| table::padding_row(stored)).flatten()
    }

    /// Whether the TorchScript exporter took the initializer from the module's state.
    fn is_module_tensor(&self, name: &str) -> bool {
        self.from_torchscript && is_from_module(name)
    }

    /// Whether the exporter lists it as a parameter, or the module's state has it under a name that PyTorch gives to
    /// parameters.
    fn is_parameter(&self, name: &str, ty: &TensorType) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        let named = last.contains("weight") || last.contains("bias");
        match self.signature.get(name) {
            Some(kind) => kind == "PARAMETER",
            None => self.is_module_tensor(name) && named && ty.shape.numel() > 1,
        }
    }

    /// Whether the module calls it as every BatchNorm of PyTorch calls its statistics.
    fn is_named_statistic(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.is_module_tensor(name) && matches!(last, "running_mean" | "running_var")
    }

    /// Whether an initializer that the exporter does not list is what its optimization made of a parameter that is gone: the weight
    /// of a matmul, the bias of a convolution, or a lookup of an embedding at fixed positions.
    fn is_folded_weight(&self, name: &str) -> bool {
        let is_operand = self.weights.contains(name) || self.biases.contains(name);
        self.lacks_parameters && (is_operand || name.starts_with("embedding"))
    }

    /// Whether this is a `[1, N]` of zeros that is added to what becomes an output, as the
    /// `final_logits_bias` of encoder-decoder models; a trained bias is a vector.
    fn is_output_offset(&self, name: &str, stored: &Stored) -> bool {
        matches!(stored.ty.shape.dims(), [1, n] if *n > 1)
            && self.offsets.contains(name)
            && stored.bytes.iter().all(|b| *b == 0)
    }
}

/// Whether a name of the TorchScript exporter is that of a tensor in the module's state; what it made itself is
/// called `onnx::Mul_12`, `/layer/Mul_output_0` or by a number.
pub(super) fn is_from_module(name: &str) -> bool {
    !name.contains("::") && !name.starts_with('/') && name.parse::<u64>().is_err()
}

/// The sources of casts and copies.
fn copied<'a>(nodes: &[&'a NodeProto]) -> HashMap<&'a str, &'a str> {
    let copies = nodes.iter().filter(|n| matches!(n.op_type.as_str(), "Cast" | "Identity"));
    let pairs =
        copies.filter_map(|n| Some((n.output.first()?.as_str(), n.input.first()?.as_str())));
    pairs.collect()
}

/// Placeholder, kind and target of each line of the exporter's signature.
pub(super) fn signature_of(graph: &GraphProto) -> impl Iterator<Item = (&str, &str, &str)> {
    let text = graph.metadata_props.iter().find(|e| e.key == SIGNATURE);
    text.into_iter().flat_map(|e| signature(&e.value))
}

/// The parameters, or what else is of this kind, of the exporter's signature: what each placeholder stands
/// for.
pub(super) fn listed(graph: &GraphProto, kind: &str) -> HashMap<String, String> {
    signature_of(graph)
        .filter(|(_, found, _)| *found == kind)
        .map(|(placeholder, _, target)| (placeholder.to_string(), target.to_string()))
        .collect()
}

/// The number of each target's line in the signature.
pub(super) fn places(graph: &GraphProto) -> HashMap<&str, usize> {
    let targets = signature_of(graph).map(|(_, _, target)| target);
    targets.enumerate().map(|(place, target)| (target, place)).collect()
}

/// `p_w: PARAMETER target='w'` per line → what each target is.
fn read_signature(text: &str) -> HashMap<String, String> {
    signature(text).map(|(_, kind, target)| (target.to_string(), kind.to_string())).collect()
}

/// `p_w: PARAMETER target='w' requires_grad=False` per line → whether each target requires a gradient, where that is said.
fn read_requires_grad(text: &str) -> HashMap<String, bool> {
    let says = |line: &str| {
        let (_, _, target) = signature(line).next()?;
        let (_, word) = line.split_once(" requires_grad=")?;
        Some((target.to_string(), word.trim() == "True"))
    };
    text.lines().filter_map(says).collect()
}

/// Placeholder, kind and target of each line.
fn signature(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    text.lines().filter_map(|line| {
        let (placeholder, rest) = line.split_once(": ")?;
        let (kind, rest) = rest.split_once(" target='")?;
        let (target, _) = rest.split_once('\'')?;
        Some((placeholder.trim(), kind.trim(), target))
    })
}

fn reaching<'a>(
    graph: &'a GraphProto,
    nodes: &[&'a NodeProto],
    blocks: impl Fn(&NodeProto) -> bool,
) -> HashSet<&'a str> {
    let mut names: HashSet<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    for node in nodes.iter().rev() {
        let differentiable = !NOT_DIFFERENTIABLE.contains(&node.op_type.as_str());
        let passes = differentiable && !exporter::is_detach(node) && !blocks(node);
        if passes && node.output.iter().any(|o| names.contains(o.as_str())) {
            // What else these read is how they do it: scales, ratios, flags.
            let first_only = matches!(node.op_type.as_str(), "Resize" | "Upsample" | "Dropout");
            let most = if first_only { 1 } else { usize::MAX };
            names.extend(operands(node).into_iter().take(most).filter(|i| !i.is_empty()));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::read_signature;

    #[test]
    fn the_exporters_signature_is_read() {
        let text = "\n# inputs\np_w: PARAMETER target='net.w'\nb_f: BUFFER target='inv_freq' \
                    persistent=False\nargs_0: USER_INPUT\n\n# outputs\nadd: USER_OUTPUT\n";
        let kinds = read_signature(text);
        assert_eq!(kinds.len(), 2);
        assert_eq!(kinds["net.w"], "PARAMETER");
        assert_eq!(kinds["inv_freq"], "BUFFER");
    }
}
