//! Stores frozen parameters in the dtype in which they are read.
//!
//! In: a graph with final dtypes, not sharded; for training, after the update is added. Out: the same graph in which a frozen
//! parameter that is read only through casts to one low-precision dtype is stored in that dtype, without the casts. Casts are found
//! behind data movement too: layout operations and table lookups. The value is rounded once, to nearest even, when it is first
//! written, instead of in every step, so results are bit-identical. A parameter that is also read in f32 is stored in f32.
//!
//! A training and its evaluation store parameters alike; the evaluation's reads count too (`PassContext::evaluated`).
//! Source: PEFT and PyTorch store a frozen base in the dtype of the model, such as `torch_dtype=torch.bfloat16`.

use crate::canonicalize;
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{Cast, ParamKind};
use frit_ir::{Code, DType, Diagnostic, Graph, NodeId, Op, Origin, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The contract of [`HoldFrozen`].
pub const INFO: PassInfo = PassInfo {
    name: "hold_frozen",
    summary: "store frozen parameters in the dtype in which they are read",
    requires: &[Property::Autocast],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Stores frozen parameters in the dtype in which they are read.
#[derive(Clone, Copy, Debug)]
pub struct HoldFrozen {
    /// Whether to do so; if not, they are stored in f32.
    pub enabled: bool,
}

impl Pass for HoldFrozen {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let found = if self.enabled { all_reads(graph) } else { BTreeMap::new() };
        let mut chosen: Vec<(ValueId, DType, Reads)> = Vec::new();
        let mut held = BTreeMap::new();
        for (value, param) in graph.params() {
            let reads = found.get(&param.name);
            let dtype = match context.held.get(&param.name) {
                Some(&known) => known,
                None if param.kind != ParamKind::Frozen => param.ty.dtype,
                // Only the evaluation of a training has it, outside of all groups, which alone have a dtype.
                None if !context.held.is_empty() => param.ty.dtype,
                None => {
                    let own = reads.iter().flat_map(|r| &r.dtypes);
                    let all: BTreeSet<DType> = own
                        .chain(context.evaluated.get(&param.name).into_iter().flatten())
                        .copied()
                        .collect();
                    match (all.first(), all.len()) {
                        (Some(dtype), 1) if is_narrower(*dtype, param.ty.dtype) => *dtype,
                        _ => param.ty.dtype,
                    }
                }
            };
            held.insert(param.name.clone(), dtype);
            if let Some(reads) = reads.filter(|_| dtype != param.ty.dtype) {
                if reads.dtypes.iter().any(|d| *d != dtype) {
                    let message =
                        format!("`{}` is stored in {dtype} and read in another dtype", param.name);
                    return Err(Diagnostic::error(Code::PassFailed, message)
                        .help("this is a bug in frit; please report it with the model"));
                }
                chosen.push((value, dtype, reads.clone()));
            }
        }
        context.held = held;
        let (mut n, mut elements) = (0, 0);
        for (value, dtype, reads) in chosen {
            let origin = graph.def(value).origin.by(INFO.name);
            let name = graph.params().find(|(v, _)| *v == value).map(|(_, p)| p.name.clone());
            context.remark(
                &Origin::new(&name.unwrap_or_default(), &origin.scope),
                format!("stored in {dtype}"),
            );
            (n, elements) = (n + 1, elements + graph.ty(value).shape.numel());
            hold(graph, value, dtype, &reads)?;
        }
        if n == 0 {
            return Ok(Changed::No);
        }
        graph.remove_dead();
        canonicalize::sort(graph)?;
        let message = format!(
            "{n} parameters of {elements} elements are stored in the dtype in which they \
                are read"
        );
        context.remark(&Origin::none(), message);
        Ok(Changed::Yes)
    }
}

/// How a parameter is read.
#[derive(Clone, Debug, Default)]
struct Reads {
    /// The dtypes in which operations compute with it.
    dtypes: BTreeSet<DType>,
    /// The layout operations on its elements before the cast.
    moves: Vec<NodeId>,
    /// The casts.
    casts: Vec<NodeId>,
}

/// The dtypes in which each parameter is read, by name.
pub fn dtypes_read(graph: &Graph) -> BTreeMap<String, BTreeSet<DType>> {
    all_reads(graph).into_iter().map(|(name, reads)| (name, reads.dtypes)).collect()
}

fn all_reads(graph: &Graph) -> BTreeMap<String, Reads> {
    let users = graph.users();
    let handed_out: HashSet<ValueId> = graph.outputs.iter().map(|o| o.value).collect();
    let reads = |v| reads(graph, v, &users, &handed_out);
    graph.params().map(|(v, param)| (param.name.clone(), reads(v))).collect()
}

fn reads(
    graph: &Graph,
    param: ValueId,
    users: &[Vec<NodeId>],
    handed_out: &HashSet<ValueId>,
) -> Reads {
    let mut found = Reads::default();
    let mut views = vec![param];
    let mut seen = HashSet::new();
    while let Some(view) = views.pop() {
        let own = graph.ty(view).dtype;
        if handed_out.contains(&view) {
            found.dtypes.insert(own);
        }
        for &user in &users[view.0 as usize] {
            let node = graph.node(user);
            match &node.op {
                Op::Cast(Cast { to }) if is_narrower(*to, own) => {
                    found.dtypes.insert(*to);
                    found.casts.push(user);
                }
                op if moves(op) && node.inputs[0] == view => {
                    if seen.insert(user) {
                        found.moves.push(user);
                        views.extend(&node.outputs);
                    }
                }
                _ => {
                    found.dtypes.insert(own);
                }
            }
        }
    }
    found
}

/// Whether the operation only moves elements of its first operand.
fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Expand(_)
            | Op::Slice(_)
            | Op::Split(_)
            | Op::Embedding(_)
            | Op::Gather(_)
    )
}

fn is_narrower(dtype: DType, than: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16) && than == DType::F32
}

/// Gives a parameter and its layout operations the dtype of the casts, and removes these.
fn hold(graph: &mut Graph, param: ValueId, dtype: DType, reads: &Reads) -> Result<(), Diagnostic> {
    let leaf = graph.value(param).def;
    if let Op::Param(p) = &mut graph.node_mut(leaf).op {
        p.held = Some(dtype);
    }
    let moves: HashSet<NodeId> = reads.moves.iter().copied().chain([leaf]).collect();
    for id in graph.order().to_vec().into_iter().filter(|id| moves.contains(id)) {
        graph.infer_again(id).map_err(bug(INFO.name))?;
    }
    let cast = |id: &NodeId| (graph.node(*id).outputs[0], graph.node(*id).inputs[0]);
    let gone: HashMap<ValueId, ValueId> = reads.casts.iter().map(cast).collect();
    graph.substitute(&gone);
    Ok(())
}
