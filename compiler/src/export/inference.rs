//! Converts a graph to inference mode: BatchNormalization uses running statistics, Dropout is the identity, and random masks
//! written out by exporters are replaced by their mean, as in `frit eval`.
//!
//! Other random operators stay, as do normalizations by batch statistics that keep no running ones; warnings name them.
//! Source: the operators' histories in ONNX's Changelog.md.

use crate::import::onnx::messages::{AttributeProto, NodeProto};
use crate::import::onnx::operands;
use frit_ir::{Code, Diagnostic, Origin};
use std::collections::{HashMap, HashSet};

/// Nodes that one warning lists at most.
const MAX_LISTED: usize = 8;
/// Operators that draw numbers.
const RANDOM: &[&str] = &[
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
];
/// Operators that hand on values of the model as they are, or make some that no data change.
const CONSTANT: &[&str] =
    &["Cast", "CastLike", "Constant", "ConstantOfShape", "Expand", "Identity"];

/// The nodes of one graph or function, in order.
pub(super) struct Scope<'a> {
    pub(super) nodes: &'a [NodeProto],
    /// Names of its results.
    pub(super) outputs: HashSet<String>,
    /// Names of tensors that the model stores, in this and enclosing graphs; for a function, its inputs.
    pub(super) stored: &'a HashSet<String>,
    /// Small stored integers.
    pub(super) integers: &'a HashMap<String, Vec<i64>>,
    /// Stored tensors of one element.
    pub(super) numbers: &'a HashSet<String>,
    /// The opset.
    pub(super) opset: i64,
    links: Links<'a>,
}

/// Who makes a value and who reads it.
#[derive(Default)]
pub(super) struct Links<'a> {
    makers: HashMap<&'a str, usize>,
    /// Places of the nodes that read it, each once; graphs inside of a node count as the node.
    readers: HashMap<&'a str, Vec<usize>>,
}

impl<'a> Links<'a> {
    fn new(nodes: &'a [NodeProto]) -> Self {
        let mut links = Links::default();
        for (i, node) in nodes.iter().enumerate() {
            let read: HashSet<&str> = operands(node).into_iter().collect();
            for name in read {
                links.readers.entry(name).or_default().push(i);
            }
            for name in &node.output {
                links.makers.entry(name).or_insert(i);
            }
        }
        links
    }
}

/// What becomes of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Edit {
    Drop,
    Change(Change),
    Instead(Vec<NodeProto>),
}

/// A node with less than it had.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// Operands and results that stay, from the first on.
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// An attribute that takes the place of the one of its name.
    pub(super) attribute: Option<AttributeProto>,
    /// Nodes that follow.
    pub(super) after: Vec<NodeProto>,
}

/// Nodes that remain in training mode, named for the user.
#[derive(Debug, Default)]
pub(super) struct Remaining {
    random: Vec<String>,
    of_batch: Vec<String>,
}

impl Remaining {
    /// Warnings about them.
    pub(super) fn warnings(self) -> Vec<Diagnostic> {
        let random = "draw random numbers: results of the exported model vary between runs";
        let of_batch = "use batch statistics and keep none: results of the exported model for an \
            example depend on the rest of its batch";
        let warning = |(code, what, help, nodes): (Code, &str, &str, Vec<String>)| {
            let n = nodes.len();
            let origin = Origin::new(nodes.first()?, "");
            let warning = Diagnostic::warning(code, format!("{n} node(s) {what}"));
            let warning = warning.at(&origin).help(help);
            Some(nodes.into_iter().take(MAX_LISTED).fold(warning, Diagnostic::note))
        };
        let kinds = [
            (
                Code::RandomInInference,
                random,
                "`frit eval` draws them too; remove them from the module",
                self.random,
            ),
            (
                Code::BatchStatisticsInInference,
                of_batch,
                "`frit eval` does the same; give the normalization running statistics",
                self.of_batch,
            ),
        ];
        kinds.into_iter().filter_map(warning).collect()
    }
}

impl<'a> Scope<'a> {
    pub(super) fn new(
        nodes: &'a [NodeProto],
        outputs: HashSet<String>,
        stored: &'a HashSet<String>,
        integers: &'a HashMap<String, Vec<i64>>,
        numbers: &'a HashSet<String>,
        opset: i64,
    ) -> Self {
        Scope { nodes, outputs, stored, integers, numbers, opset, links: Links::new(nodes) }
    }

    /// What becomes of the nodes, by their places; what stays as in training is added to `remaining`.
    pub(super) fn edits(&self, remaining: &mut Remaining) -> HashMap<usize, Edit> {
        let mut edits = self.masks();
        for (i, node) in self.nodes.iter().enumerate().filter(|(_, n)| is_default(n)) {
            match node.op_type.as_str() {
                "BatchNormalization" => match self.batch_norm(node) {
                    Ok(edit) => edits.extend(edit.map(|e| (i, e))),
                    Err(()) => remaining.of_batch.push(label(node)),
                },
                "Dropout" => edits.extend(self.dropout(node).map(|e| (i, e))),
                "ReduceMean" if self.centers_the_batch(node) => {
                    remaining.of_batch.push(label(node))
                }
                op if RANDOM.contains(&op) && !edits.contains_key(&i) => {
                    remaining.random.push(label(node));
                }
                _ => {}
            }
        }
        edits
    }

    /// The normalization by running statistics, if it is not; an error if it has none.
    fn batch_norm(&self, node: &NodeProto) -> Result<Option<Edit>, ()> {
        let more = node.output.iter().skip(1).any(|name| !name.is_empty());
        let of_batch = match self.opset {
            ..7 => integer(node, "is_test") == Some(0),
            7..14 => more,
            _ => integer(node, "training_mode") == Some(1),
        };
        let statistics: Vec<&str> =
            node.input.iter().skip(3).map(|name| self.source(name, &["Identity"])).collect();
        let stored = statistics.iter().all(|name| self.stored.contains(*name));
        if !of_batch {
            let computed = |name: &&str| {
                self.maker(self.source(name, CONSTANT)).is_some_and(|n| n.op_type != "Constant")
            };
            return if stored || !statistics.iter().any(computed) { Ok(None) } else { Err(()) };
        }
        if !stored || statistics.len() != 2 {
            return Err(());
        }
        // The new running statistics are the old ones; before opset 14 those of the batch follow.
        let further = node.output.iter().enumerate().skip(1);
        let read = further.filter(|(_, name)| !name.is_empty() && self.is_read(name));
        let after = read.map(|(i, name)| identity(node, &node.input[4 - i % 2], name)).collect();
        let attribute = match self.opset {
            ..7 => Some(("is_test", 1)),
            7..14 => None,
            _ => Some(("training_mode", 0)),
        };
        let attribute = attribute.map(|(name, i)| AttributeProto {
            name: name.into(),
            i,
            r#type: 2,
            ..AttributeProto::default()
        });
        Ok(Some(Edit::Change(Change { inputs: usize::MAX, outputs: 1, attribute, after })))
    }

    /// The Dropout that keeps everything, if it does not.
    fn dropout(&self, node: &NodeProto) -> Option<Edit> {
        let (inputs, attribute) = match self.opset {
            ..7 => {
                let name = "is_test".into();
                let set = AttributeProto { name, i: 1, r#type: 2, ..AttributeProto::default() };
                (usize::MAX, Some(set))
            }
            7..12 => return None,
            _ if node.input.len() < 3 => return None,
            _ => (2, None),
        };
        Some(Edit::Change(Change { inputs, outputs: usize::MAX, attribute, after: vec![] }))
    }

    /// Whether the node is a mean over the first axis, which its operand is then centered by.
    fn centers_the_batch(&self, node: &NodeProto) -> bool {
        let (Some(x), Some(mean)) = (node.input.first(), node.output.first()) else { return false };
        let given = node.attribute.iter().find(|a| a.name == "axes").map(|a| a.ints.clone());
        let axes = given.or_else(|| self.known(node.input.get(1)?));
        let reads = || self.links.readers.get(mean.as_str()).into_iter().flatten();
        let is_center = |i: &usize| {
            let node = &self.nodes[*i];
            node.op_type == "Sub" && node.input[..] == [x.clone(), mean.clone()]
        };
        axes.is_some_and(|axes| axes.contains(&0)) && reads().any(is_center)
    }

    /// The integers that a name stands for.
    fn known(&self, name: &str) -> Option<Vec<i64>> {
        let name = self.source(name, &["Cast", "Identity", "Reshape"]);
        let constant = || {
            let node = self.maker(name).filter(|n| n.op_type == "Constant")?;
            let value = node.attribute.first()?;
            let raw = value.t.as_ref().map(|t| match &t.raw_data {
                Some(raw) => {
                    raw.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
                }
                None => t.int64_data.clone(),
            });
            raw.or_else(|| Some(value.ints.clone()))
        };
        self.integers.get(name).cloned().or_else(constant)
    }

    /// Whether one known number has this name.
    fn is_number(&self, name: &str) -> bool {
        let name = self.source(name, &["Cast", "CastLike", "Identity"]);
        let single = |a: &AttributeProto| match a.name.as_str() {
            "value" => a.t.as_ref().is_some_and(|t| t.dims.iter().all(|n| *n == 1)),
            "value_float" => true,
            _ => false,
        };
        let constant = |n: &NodeProto| n.op_type == "Constant" && n.attribute.iter().all(single);
        self.numbers.contains(name) || self.maker(name).is_some_and(constant)
    }

    /// Masks that are drawn as uniform numbers: what reads them gets the probability that an element is kept. These
    /// are those that the front end knows as masks.
    fn masks(&self) -> HashMap<usize, Edit> {
        let mut edits = HashMap::new();
        // Expand exists since opset 8.
        let uniform =
            self.nodes.iter().enumerate().filter(|(_, n)| self.opset >= 8 && is_uniform(n));
        for (i, uniform) in uniform {
            let Some(found) = self.mask(i, uniform) else { continue };
            edits.extend(found);
        }
        edits
    }

    fn mask(&self, i: usize, uniform: &NodeProto) -> Option<HashMap<usize, Edit>> {
        let (drawn, like) = (uniform.output.first()?, uniform.input.first()?);
        // Some only take the dtype from it.
        let is_like = |n: &NodeProto| n.op_type == "CastLike" && n.input.first() != Some(drawn);
        let (casts, reads): (Vec<usize>, Vec<usize>) =
            self.readers(drawn)?.into_iter().partition(|r| is_like(&self.nodes[*r]));
        let [reader] = reads[..] else { return None };
        let node = &self.nodes[reader];
        let mut edits: HashMap<usize, Edit> = [(i, Edit::Drop), (reader, Edit::Drop)].into();
        match (node.op_type.as_str(), &node.input[..]) {
            ("Less", [first, p]) if first == drawn => {
                let cast = casts.iter().find(|c| self.nodes[**c].output[..] == [p.clone()]);
                let keep = cast.map_or(p, |c| &self.nodes[*c].input[0]);
                let dropped: Vec<usize> = cast.into_iter().copied().collect();
                if !self.is_number(keep)
                    || dropped != casts
                    || (cast.is_some() && self.readers(p)?.len() > 1)
                {
                    return None;
                }
                edits.extend(dropped.into_iter().map(|c| (c, Edit::Drop)));
                for user in self.readers(node.output.first()?)? {
                    edits.insert(
                        user,
                        Edit::Instead(self.on_average(user, &node.output[0], keep, like)?),
                    );
                }
            }
            ("Add", [a, b]) if casts.is_empty() => {
                let keep = if a == drawn { b } else { a };
                let [floor] = self.readers(node.output.first()?)?[..] else { return None };
                let number = &self.nodes[floor];
                if number.op_type != "Floor" || !self.is_number(keep) {
                    return None;
                }
                edits.insert(floor, Edit::Instead(expanded(number, keep, like, &number.output[0])));
            }
            _ => return None,
        }
        Some(edits)
    }

    /// The nodes for one that reads a mask which is true with probability `keep` and has the shape of `like`.
    fn on_average(
        &self,
        user: usize,
        mask: &str,
        keep: &str,
        like: &str,
    ) -> Option<Vec<NodeProto>> {
        let node = &self.nodes[user];
        let result = node.output.first()?;
        let inner = |what: &str| format!("{result}/{what}");
        let make = |op: &str, inputs: &[&str], output: &str| node_of(node, op, inputs, output);
        let mut nodes = expanded(node, keep, like, &inner("keep"));
        match (node.op_type.as_str(), &node.input[..]) {
            ("Cast", [_]) => {
                let cast = make("Cast", &[&inner("keep")], result);
                nodes.push(NodeProto { attribute: node.attribute.clone(), ..cast });
            }
            ("CastLike", [first, of]) if first == mask => {
                nodes.push(make("CastLike", &[&inner("keep"), of], result));
            }
            ("Where", [condition, a, b])
                if condition == mask && a != mask && b != mask && self.opset >= 15 =>
            {
                let one = AttributeProto {
                    name: "value_float".into(),
                    f: 1.0,
                    r#type: 1,
                    ..AttributeProto::default()
                };
                nodes.extend([
                    make("CastLike", &[&inner("keep"), a], &inner("kept")),
                    NodeProto { attribute: vec![one], ..make("Constant", &[], &inner("one")) },
                    make("CastLike", &[&inner("one"), a], &inner("all")),
                    make("Sub", &[&inner("all"), &inner("kept")], &inner("other")),
                    make("Mul", &[a, &inner("kept")], &inner("first")),
                    make("Mul", &[b, &inner("other")], &inner("second")),
                    make("Add", &[&inner("first"), &inner("second")], result),
                ]);
            }
            _ => return None,
        }
        Some(nodes)
    }

    /// The places of the nodes that read a value; `None` if a graph inside of one does, or it is a result.
    fn readers(&self, name: &str) -> Option<Vec<usize>> {
        let readers = self.links.readers.get(name).cloned().unwrap_or_default();
        let direct = readers.iter().all(|i| self.nodes[*i].input.iter().any(|input| input == name));
        (direct && !self.outputs.contains(name)).then_some(readers)
    }

    fn is_read(&self, name: &str) -> bool {
        self.outputs.contains(name) || self.links.readers.contains_key(name)
    }

    /// The node that makes a value here.
    fn maker(&self, name: &str) -> Option<&NodeProto> {
        self.links.makers.get(name).map(|i| &self.nodes[*i])
    }

    /// The definition of a value, skipping these operators.
    fn source<'n>(&'n self, name: &'n str, through: &[&str]) -> &'n str {
        let (mut name, mut steps) = (name, 0);
        while let Some(node) = self.maker(name)
            && through.contains(&node.op_type.as_str())
            && let Some(first) = node.input.first()
            && steps < self.nodes.len()
        {
            (name, steps) = (first, steps + 1);
        }
        name
    }
}

/// `keep` in the shape of `like`, as a value of this name; the nodes are those of `of`.
fn expanded(of: &NodeProto, keep: &str, like: &str, name: &str) -> Vec<NodeProto> {
    let shape = format!("{name}/shape");
    vec![node_of(of, "Shape", &[like], &shape), node_of(of, "Expand", &[keep, &shape], name)]
}

fn identity(of: &NodeProto, input: &str, output: &str) -> NodeProto {
    node_of(of, "Identity", &[input], output)
}

/// A node in the place of `of`.
fn node_of(of: &NodeProto, op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: op.into(),
        name: if of.name.is_empty() { String::new() } else { format!("{}/{output}/{op}", of.name) },
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec![output.into()],
        attribute: vec![],
        ..of.clone()
    }
}

/// Whether the node is of ONNX's own operators.
fn is_default(node: &NodeProto) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx")
}

/// Whether the node draws numbers between 0 and 1 in the shape of its operand.
fn is_uniform(node: &NodeProto) -> bool {
    let number = |name: &str, default: f32| {
        node.attribute.iter().find(|a| a.name == name).map_or(default, |a| a.f)
    };
    is_default(node)
        && node.op_type == "RandomUniformLike"
        && number("low", 0.0) == 0.0
        && number("high", 1.0) == 1.0
}

/// The attribute's value, 0 if the node has none; one that a call of the function gives may be anything, so 1 or 0 as
/// it trains.
fn integer(node: &NodeProto, name: &str) -> Option<i64> {
    match node.attribute.iter().find(|a| a.name == name) {
        None => Some(0),
        Some(a) if !a.ref_attr_name.is_empty() => Some(i64::from(name == "training_mode")),
        Some(a) => Some(i64::from(a.i != 0)),
    }
}

/// How people find the node.
fn label(node: &NodeProto) -> String {
    let own = if node.name.is_empty() { node.output.first() } else { Some(&node.name) };
    format!("{} \"{}\"", node.op_type, own.map_or("", String::as_str))
}
