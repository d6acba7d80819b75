//! Low-rank adapters: the model's parameters are frozen, and beside chosen weights two small matrices train.
//!
//! In: a graph as the front end read it. Out: for each weight `W` of a target module, `x·W` is `x·W + s·(dropout(x)·Aᵀ)·Bᵀ` with
//! `A[rank, in]`, `B[out, rank]` and `s = alpha / rank`. `B` begins at zero, so that the model begins unchanged. Every other parameter
//! is frozen, unless a pattern says that it trains too. Source: Hu et al. 2021 (LoRA); names and initial values are those of PEFT.

use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{BinaryFn, Cast, Constant, Init, MatMul, Param, ParamKind, RandomMask, random};
use frit_ir::{
    Code, DType, Diagnostic, Graph, GraphError, NodeId, Op, Origin, Region, Shape, Tensor,
    TensorType, ValueId, nearest, pattern,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The contract of [`Lora`].
pub const INFO: PassInfo = PassInfo {
    name: "adapter",
    summary: "freeze the model and add low-rank adapters to the weights of matmuls",
    requires: &[],
    ensures: &[],
    breaks: &[Property::Canonical],
    numerics: Numerics::Bitwise,
};

/// Adds low-rank adapters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lora {
    /// Columns of `A` and `B`.
    pub rank: usize,
    /// `rank` times the factor of the adapter's result.
    pub alpha: f64,
    /// Probability that an element of the adapter's operand is dropped.
    pub dropout: f64,
    /// Patterns of the modules that get an adapter; none leave the graph alone.
    pub targets: Vec<String>,
    /// Patterns of parameters that train as well.
    pub trainable: Vec<String>,
    /// Patterns of parameters that do not train, matrices of adapters among them.
    pub frozen: Vec<String>,
}

/// The adapter of one weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapted {
    /// Whether the weight is stored as `[out, in]`, like that of `torch.nn.Linear`.
    pub out_first: bool,
    /// The factor of `B·A`.
    pub scale: f64,
}

/// The patterns of `params.trainable` that mean something beside an adapter: its default, every parameter, does not.
pub fn trainable(patterns: &[String]) -> Vec<String> {
    patterns.iter().filter(|pattern| *pattern != "**").cloned().collect()
}

/// The module that a parameter belongs to, if it is its weight; else the name.
pub fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// Names of the two matrices of a weight's adapter.
pub fn names(weight: &str) -> [String; 2] {
    ["A", "B"].map(|matrix| format!("{}.lora_{matrix}.weight", module(weight)))
}

/// Whether a pattern of parameters is about matrices of adapters, which their names say.
pub fn is_of_matrices(pattern: &str) -> bool {
    pattern.contains("lora_")
}

/// A matmul that reads a weight as its right operand.
struct Use {
    node: NodeId,
    /// Whether the weight is `[out, in]`.
    out_first: bool,
}

impl Pass for Lora {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        if self.targets.is_empty() {
            return Ok(Changed::No);
        }
        let weights = self.weights(graph)?;
        self.freeze(graph);
        let mut map = HashMap::new();
        for (weight, uses) in &weights {
            let Op::Param(param) = graph.def(*weight).op.clone() else { continue };
            let scale = self.alpha / self.rank as f64;
            let origin = graph.def(*weight).origin.by(INFO.name);
            let mut b = Builder { graph, origin };
            let matrices = b.matrices(&param, uses[0].out_first, self).map_err(bug(INFO.name))?;
            for user in uses {
                let (y, sum) =
                    b.adapt(user, matrices, scale, self.dropout).map_err(bug(INFO.name))?;
                map.insert(y, sum);
            }
            let origin = b.origin;
            context
                .remark(&origin, format!("adapter of rank {} beside `{}`", self.rank, param.name));
            let adapted = Adapted { out_first: uses[0].out_first, scale };
            context.adapters.insert(param.name.clone(), adapted);
        }
        graph.substitute(&map);
        graph.remove_dead();
        graph
            .sort()
            .map_err(|_| Diagnostic::error(Code::PassFailed, "cycle after pass `adapter`"))?;
        Ok(Changed::Yes)
    }
}

impl Lora {
    /// The weights that get an adapter, with the matmuls that read them.
    fn weights(&self, graph: &Graph) -> Result<BTreeMap<ValueId, Vec<Use>>, Diagnostic> {
        let users = graph.users();
        let (mut weights, mut unfit) = (BTreeMap::new(), BTreeMap::new());
        let mut covered = BTreeSet::new();
        for (value, param) in graph.params() {
            let name = module(&param.name);
            let by = self.targets.iter().filter(|target| pattern::matches(target, name));
            let by: Vec<&String> = by.collect();
            if by.is_empty() {
                continue;
            }
            match uses(graph, &users, value) {
                Some(found) => {
                    covered.extend(by);
                    weights.insert(value, found);
                }
                None => unfit.extend(by.into_iter().map(|target| (target, name))),
            }
        }
        if let Some(target) = self.targets.iter().find(|target| !covered.contains(target)) {
            let fitting = || graph.params().filter(|(v, _)| uses(graph, &users, *v).is_some());
            let advice = nearest::advice(target, fitting().map(|(_, p)| module(&p.name)));
            let message = match unfit.get(target) {
                Some(name) => format!(
                    "`{target}` in adapter.targets is `{name}`, whose weight is not only the right operand of matmuls"
                ),
                None => format!("`{target}` in adapter.targets matches no module with a weight"),
            };
            let below = format!("**.{target}");
            let mut modules = fitting().map(|(_, p)| module(&p.name));
            let is_below = modules.any(|name| pattern::matches(&below, name));
            let advice = match target.strip_suffix(".weight") {
                _ if is_below => format!("write `{below}`"),
                Some(module) => format!("patterns name modules: write `{module}`; {advice}"),
                None => advice,
            };
            return Err(Diagnostic::error(Code::AdapterTarget, message).help(advice));
        }
        let mut taken: BTreeSet<String> = graph.params().map(|(_, p)| p.name.clone()).collect();
        for (_, param) in graph.params().filter(|(value, _)| weights.contains_key(value)) {
            let made = names(&param.name);
            if let Some(name) = made.into_iter().find(|name| !taken.insert(name.clone())) {
                let message = format!(
                    "the adapter of `{}` has a matrix `{name}`, as the model has already",
                    param.name
                );
                let help =
                    "rename the model's parameter, or leave this module out of adapter.targets";
                return Err(Diagnostic::error(Code::AdapterTarget, message).help(help));
            }
        }
        Ok(weights)
    }

    /// The kind of a matrix of an adapter, and why. All train, unless patterns are about matrices.
    fn kind(&self, name: &str) -> (ParamKind, &'static str) {
        let about = |patterns: &[String]| -> Vec<String> {
            patterns.iter().filter(|pattern| is_of_matrices(pattern)).cloned().collect()
        };
        let (frozen, trainable) = (about(&self.frozen), about(&self.trainable));
        match () {
            () if pattern::any(&frozen, name) => {
                (ParamKind::Frozen, "`params.frozen` matches this matrix of an adapter")
            }
            () if !trainable.is_empty() && !pattern::any(&trainable, name) => {
                (ParamKind::Frozen, "`params.trainable` names other matrices of adapters")
            }
            () => (ParamKind::Trainable, "a matrix of an adapter"),
        }
    }

    /// Freezes every parameter that no pattern lets train.
    fn freeze(&self, graph: &mut Graph) {
        for id in graph.order().to_vec() {
            let Op::Param(param) = &mut graph.node_mut(id).op else { continue };
            if param.kind == ParamKind::Trainable && !pattern::any(&self.trainable, &param.name) {
                param.kind = ParamKind::Frozen;
                param.reason = "the adapter trains instead".into();
            }
        }
    }
}

/// The matmuls that read a matrix as their right operand, all in one layout, if nothing else reads it.
fn uses(graph: &Graph, users: &[Vec<NodeId>], weight: ValueId) -> Option<Vec<Use>> {
    let ty = graph.ty(weight);
    if ty.shape.rank() != 2 || !ty.dtype.is_float() {
        return None;
    }
    let (mut found, mut open) = (Vec::new(), vec![(weight, false)]);
    while let Some((value, turned)) = open.pop() {
        if graph.outputs.iter().any(|o| o.value == value) {
            return None;
        }
        for &node in &users[value.0 as usize] {
            let user = graph.node(node);
            match &user.op {
                Op::Transpose(t) if t.perm == [1, 0] => open.push((user.outputs[0], !turned)),
                // Of a model that is stored in fewer bits than it trains in.
                Op::Cast(cast) if cast.to.is_float() => open.push((user.outputs[0], turned)),
                Op::EnterPrecision(_) => open.push((user.outputs[0], turned)),
                Op::MatMul(op) if user.inputs[1] == value && user.inputs[0] != value => {
                    found.push(Use { node, out_first: turned != op.trans_b });
                }
                _ => return None,
            }
        }
    }
    let one_layout = found.iter().all(|u| u.out_first == found[0].out_first);
    (!found.is_empty() && one_layout).then_some(found)
}

/// Adds nodes with one origin.
struct Builder<'a> {
    graph: &'a mut Graph,
    origin: Origin,
}

impl Builder<'_> {
    fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        self.graph.add1(op, inputs, self.origin.clone(), Region::Forward)
    }

    fn number(&mut self, dtype: DType, value: f64) -> Result<ValueId, GraphError> {
        let value = Tensor::splat(TensorType::scalar(dtype), value);
        self.add(Op::Constant(Constant { value }), &[])
    }

    /// `x` times a number, computed in f32 if the dtype of `x` does not hold it.
    fn scaled(&mut self, x: ValueId, factor: f64) -> Result<ValueId, GraphError> {
        let dtype = self.graph.ty(x).dtype;
        let is_held = !dtype.is_low_precision() || dtype.round(factor) == factor;
        let computed = if is_held { dtype } else { DType::F32 };
        let (wide, factor) = (self.cast(x, computed)?, self.number(computed, factor)?);
        let product = self.add(Op::Binary(BinaryFn::Mul), &[wide, factor])?;
        self.cast(product, dtype)
    }

    /// `A` and `B` of a weight. `A` is uniform within `1/√in`, as Kaiming initialization with a slope of √5 is.
    fn matrices(
        &mut self,
        weight: &Param,
        out_first: bool,
        lora: &Lora,
    ) -> Result<[ValueId; 2], GraphError> {
        let rank = lora.rank;
        let dims = weight.ty.shape.dims();
        let (width, height) = if out_first { (dims[1], dims[0]) } else { (dims[0], dims[1]) };
        let bound = 1.0 / (width.max(1) as f64).sqrt();
        let inits = [Init::Uniform { bound }, Init::Constant(0.0)];
        let [a, b] = names(&weight.name);
        let mut made = [(a, [rank, width]), (b, [height, rank])].into_iter().zip(inits).map(
            |((name, shape), init)| {
                let (kind, reason) = lora.kind(&name);
                let param = Param {
                    ty: TensorType::new(weight.ty.dtype, shape),
                    kind,
                    reason: reason.into(),
                    init,
                    name: name.clone(),
                    held: None,
                    unit: None,
                    sharded: false,
                };
                let value = self.add(Op::Param(param), &[])?;
                self.graph.set_name(value, &name);
                Ok(value)
            },
        );
        let mut next = || made.next().expect("invariant: two matrices");
        Ok([next()?, next()?])
    }

    /// The result of a matmul, and what takes its place.
    fn adapt(
        &mut self,
        user: &Use,
        [a, b]: [ValueId; 2],
        scale: f64,
        dropout: f64,
    ) -> Result<(ValueId, ValueId), GraphError> {
        let node = self.graph.node(user.node).clone();
        let Op::MatMul(op) = &node.op else { unreachable!("a use is a matmul") };
        let dropped = self.dropped(node.inputs[0], dropout)?;
        let dtype = self.graph.ty(dropped).dtype;
        let (a, b) = (self.cast(a, dtype)?, self.cast(b, dtype)?);
        let onto = |trans_a, out| Op::MatMul(MatMul { trans_a, trans_b: true, out });
        let narrow = self.add(onto(op.trans_a, None), &[dropped, a])?;
        let scaled = self.scaled(narrow, scale)?;
        let adapter = self.add(onto(false, op.out), &[scaled, b])?;
        // The matmul anew, since all uses of the old one become uses of the sum.
        let y = self.graph.add1(node.op.clone(), &node.inputs, node.origin.clone(), node.region)?;
        let sum = self.add(Op::Binary(BinaryFn::Add), &[y, adapter])?;
        Ok((node.outputs[0], sum))
    }

    fn cast(&mut self, x: ValueId, to: DType) -> Result<ValueId, GraphError> {
        if self.graph.ty(x).dtype == to { Ok(x) } else { self.add(Op::Cast(Cast { to }), &[x]) }
    }

    /// Elements of `x` dropped with a probability; the others divided by that of keeping them.
    fn dropped(&mut self, x: ValueId, dropout: f64) -> Result<ValueId, GraphError> {
        if dropout == 0.0 {
            return Ok(x);
        }
        let (ty, keep) = (self.graph.ty(x).clone(), 1.0 - dropout);
        let rng = random::generator(self.graph, &self.origin)?;
        let id = random::next_id(self.graph);
        let mask = RandomMask { shape: Shape(ty.shape.0.clone()), keep, id };
        let mask = self.add(Op::RandomMask(mask), &[rng])?;
        let kept = self.scaled(x, 1.0 / keep)?;
        let zero = self.number(ty.dtype, 0.0)?;
        self.add(Op::Select, &[mask, kept, zero])
    }
}
