//! Which parameters Muon steps: the matrices of hidden layers. All others are stepped by AdamW.
//!
//! A hidden matrix has two axes and is read by matmuls alone, as it is or cast, transposed, reshaped or split; the
//! results of these reach the loss through other matmuls or convolutions by parameters. So neither embeddings nor the
//! last layer are hidden, also where they share a table.

use super::Update;
use crate::pass::PassContext;
use frit_ir::ops::{OptimizerKind, ParamKind};
use frit_ir::{Code, Diagnostic, Graph, Node, NodeId, Op, Origin, OutputKind, Region, ValueId};
use std::collections::{BTreeSet, HashMap, HashSet};

/// What a parameter is, as far as Muon is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A matrix of a hidden layer.
    Hidden,
    /// It has not two axes, or no elements.
    NoMatrix,
    /// It is read by something else than a matmul.
    Table,
    /// Its matmul is the last before the loss.
    Last,
}

impl Role {
    /// Why AdamW steps it.
    fn reason(self) -> &'static str {
        match self {
            Role::Hidden => "a matrix of a hidden layer",
            Role::NoMatrix => "no matrix",
            Role::Table => "not read by matmuls alone",
            Role::Last => "of the last layer",
        }
    }
}

impl Update {
    /// The optimizer of each parameter: the configured one, except that Muon steps only some.
    pub(super) fn kinds(
        &self,
        graph: &Graph,
        names: &[(String, ValueId)],
        context: &mut PassContext,
    ) -> Result<Vec<OptimizerKind>, Diagnostic> {
        if self.optimizer != OptimizerKind::Muon {
            return Ok(vec![self.optimizer; names.len()]);
        }
        let roles = roles(graph);
        let mut kinds = Vec::with_capacity(names.len());
        let mut n_elements = [0; 2];
        for (name, gradient) in names {
            let role = roles.get(name).copied().unwrap_or(Role::NoMatrix);
            let ty = graph.ty(*gradient);
            let kind = match (self.groups.kind_of(name), role) {
                (Some(OptimizerKind::Muon), Role::NoMatrix) => {
                    let message = format!("Muon cannot step the parameter `{name}`: {}", ty.shape);
                    let help = "Muon steps matrices; let the scope of the [[optimizer.group]] with kind = \"muon\" \
                        cover no others, as \"**.weight\" may";
                    return Err(Diagnostic::error(Code::MuonMatrices, message).help(help));
                }
                (Some(kind), _) => kind,
                (None, Role::Hidden) => OptimizerKind::Muon,
                (None, _) => OptimizerKind::Adamw,
            };
            n_elements[usize::from(kind == OptimizerKind::Adamw)] += ty.shape.numel();
            if kind == OptimizerKind::Adamw {
                let why = match role {
                    Role::Hidden => "as its [[optimizer.group]] says",
                    other => other.reason(),
                };
                context.remark(&Origin::none(), format!("AdamW steps `{name}`: {why}"));
            }
            kinds.push(kind);
        }
        let n = kinds.iter().filter(|k| **k == OptimizerKind::Muon).count();
        let (all, elements) = (n_elements[0] + n_elements[1], n_elements[0]);
        let message = format!(
            "Muon steps {n} of {} parameters, {elements} of {all} elements; AdamW the others",
            kinds.len()
        );
        context.remark(&Origin::none(), message);
        if n == 0 {
            let help = "it steps matrices of hidden layers; name others by [[optimizer.group]] with kind = \"muon\", \
                or set optimizer.kind = \"adamw\"";
            context.warn(
                Diagnostic::warning(Code::MuonStepsNothing, "Muon steps no parameter").help(help),
            );
        }
        Ok(kinds)
    }
}

/// The roles of trainable parameters, by name, in a graph with a loss.
fn roles(graph: &Graph) -> HashMap<String, Role> {
    let users = graph.users();
    let weights = Weights::of(graph, &users);
    let last = weights.last(graph);
    let mut roles = HashMap::new();
    for (value, param) in graph.params().filter(|(_, p)| p.kind == ParamKind::Trainable) {
        let shape = &graph.ty(value).shape;
        let role = match weights.readers.get(&value) {
            _ if shape.rank() != 2 || shape.numel() == 0 => Role::NoMatrix,
            Some(readers) if readers.is_empty() => Role::Table,
            None => Role::Table,
            Some(readers) if readers.iter().any(|id| last.contains(id)) => Role::Last,
            Some(readers) => match readers.iter().all(|id| is_matmul(graph.node(*id))) {
                true => Role::Hidden,
                false => Role::Table,
            },
        };
        roles.insert(param.name.clone(), role);
    }
    roles
}

fn is_matmul(node: &Node) -> bool {
    matches!(node.op, Op::MatMul(_))
}

/// Nodes of the forward pass that read parameters.
struct Weights {
    /// By parameter; seen through casts and layout.
    readers: HashMap<ValueId, BTreeSet<NodeId>>,
    /// Matmuls and convolutions by a parameter.
    layers: HashSet<NodeId>,
}

impl Weights {
    fn of(graph: &Graph, users: &[Vec<NodeId>]) -> Weights {
        let (mut readers, mut layers) = (HashMap::new(), HashSet::new());
        for (param, _) in graph.params().filter(|(_, p)| p.kind != ParamKind::Buffer) {
            let found: &mut BTreeSet<NodeId> = readers.entry(param).or_default();
            let (mut open, mut seen) = (vec![param], HashSet::from([param]));
            while let Some(value) = open.pop() {
                for &user in &users[value.0 as usize] {
                    let node = graph.node(user);
                    if node.region != Region::Forward {
                        continue;
                    }
                    if matches!(node.op, Op::Cast(_)) || is_view(&node.op) {
                        open.extend(node.outputs.iter().filter(|v| seen.insert(**v)));
                        continue;
                    }
                    found.insert(user);
                    if matches!(node.op, Op::MatMul(_) | Op::Conv(_) | Op::ConvGradInput(_)) {
                        layers.insert(user);
                    }
                }
            }
        }
        Weights { readers, layers }
    }

    /// The layers whose results reach the loss through no other.
    fn last(&self, graph: &Graph) -> HashSet<NodeId> {
        let losses = graph.outputs.iter().filter(|o| o.kind == OutputKind::LossSum);
        let mut open: Vec<NodeId> = losses.map(|o| graph.value(o.value).def).collect();
        let mut seen: HashSet<NodeId> = open.iter().copied().collect();
        let mut last = HashSet::new();
        while let Some(id) = open.pop() {
            if self.layers.contains(&id) {
                last.insert(id);
                continue;
            }
            let defs = graph.node(id).inputs.iter().map(|v| graph.value(*v).def);
            open.extend(defs.filter(|def| seen.insert(*def)));
        }
        last
    }
}

/// Whether an operation keeps the elements of one operand, in another place.
fn is_view(op: &Op) -> bool {
    op.is_layout() && !matches!(op, Op::Concat(_))
}
