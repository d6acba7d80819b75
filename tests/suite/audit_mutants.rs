//! `frit audit` against plans that compute something wrong: bodies of kernels with another operation, operand, constant or axis,
//! as a wrong gradient rule or pass would make them; kernels whose code computes something else than their body; tasks with other
//! operands; collectives that add up otherwise; numbers of the optimizer. All digests are made anew.
//!
//! A mutant that changes a result must be found. What a result is, its own execution says: losses, gradients, and all state after
//! two steps. `FRIT_AUDIT_MUTANTS` sets their number.

use crate::audit::{options, small};
use crate::machine::Random;
use crate::support::Planned;
use clap::Parser;
use frit::audit::{Agreement, Audit, Options, Verdict, audit};
use frit::commands::{Cli, execute};
use frit::diagnostics::Report;
use frit_ir::ops::{BinaryFn, Constant, ReduceFn, ReduceKind, UnaryFn};
use frit_ir::plan::{Action, Entry, Kernel, KernelId, Plan, TaskId, check, seal};
use frit_ir::{Graph, NodeId, Op, Tensor, TensorData};
use frit_runtime::data::{Data, Source};
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::record::{self, Recorded, record};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Mutants, unless `FRIT_AUDIT_MUTANTS` says otherwise.
const MUTANTS: usize = 120;
/// The least relative change that an audit must find, of a plan in f32.
const CHANGED: f64 = 2e-3;

/// A kind of change; false if there is nothing to change.
type Mutation = fn(&mut Plan, &mut Random) -> bool;

const KINDS: [(&str, Mutation); 12] = [
    ("another operation", |p, r| in_body(p, r, other_operation)),
    ("operands exchanged", |p, r| in_body(p, r, exchanged_operands)),
    ("a constant scaled", |p, r| in_body(p, r, scaled_constant)),
    ("a term dropped", |p, r| in_body(p, r, dropped_term)),
    ("a matrix transposed", |p, r| in_body(p, r, transposed_matrix)),
    ("another axis or mean", |p, r| in_body(p, r, other_reduction)),
    ("another factor", |p, r| in_body(p, r, other_factor)),
    ("reads exchanged", exchanged_reads),
    ("zero in place of a result", zeroed),
    ("a collective adds otherwise", other_collective),
    ("a hyper-parameter", other_hyper),
    ("first values of state", other_state),
];

fn pick<T: Copy>(all: &[T], random: &mut Random) -> Option<T> {
    (!all.is_empty()).then(|| all[random.below(all.len())])
}

/// Changes a node of the body of some kernel, which the interpreter executes then.
fn in_body(
    plan: &mut Plan,
    random: &mut Random,
    change: fn(&mut Graph, NodeId, &mut Random) -> bool,
) -> bool {
    let kernels: Vec<KernelId> = plan.kernels.keys().collect();
    let Some(k) = pick(&kernels, random) else { return false };
    let mut body = plan.kernels[k].body.clone();
    let nodes: Vec<NodeId> = body.order().to_vec();
    let Some(node) = pick(&nodes, random) else { return false };
    if !change(&mut body, node, random) {
        return false;
    }
    let name = plan.kernels[k].name.clone();
    plan.kernels[k] = Kernel::new(name, body, Entry::Interpreter);
    true
}

fn other_operation(body: &mut Graph, at: NodeId, random: &mut Random) -> bool {
    let other = match &body.node(at).op {
        Op::Binary(BinaryFn::Add) => Op::Binary(BinaryFn::Sub),
        Op::Binary(BinaryFn::Sub) => Op::Binary(BinaryFn::Add),
        Op::Binary(BinaryFn::Mul) => Op::Binary([BinaryFn::Add, BinaryFn::Max][random.below(2)]),
        Op::Binary(BinaryFn::Div) => Op::Binary(BinaryFn::Mul),
        Op::Unary(UnaryFn::Tanh) => Op::Unary(UnaryFn::Sigmoid),
        Op::Unary(UnaryFn::Exp) => Op::Unary(UnaryFn::Neg),
        Op::Unary(UnaryFn::Neg) => Op::Unary(UnaryFn::Abs),
        Op::Unary(UnaryFn::Rsqrt) => Op::Unary(UnaryFn::Sqrt),
        _ => return false,
    };
    body.node_mut(at).op = other;
    true
}

fn exchanged_operands(body: &mut Graph, at: NodeId, _: &mut Random) -> bool {
    let mut inputs = body.node(at).inputs.clone();
    let same = |a, b| body.ty(a) == body.ty(b) && a != b;
    let first = (1..inputs.len()).find(|i| same(inputs[i - 1], inputs[*i]));
    let Some(i) = first else { return false };
    inputs.swap(i - 1, i);
    body.set_inputs(at, inputs).is_ok()
}

fn scaled_constant(body: &mut Graph, at: NodeId, random: &mut Random) -> bool {
    let factor = [0.5, 2.0, -1.0, 1.1][random.below(4)];
    let Op::Constant(Constant { value }) = &mut body.node_mut(at).op else { return false };
    let Some(values) = value.as_floats() else { return false };
    let values = values.iter().map(|x| x * factor).collect();
    *value = Tensor::exact(value.ty.clone(), TensorData::Float(values));
    true
}

fn dropped_term(body: &mut Graph, at: NodeId, random: &mut Random) -> bool {
    let node = body.node(at).clone();
    let fits: Vec<_> =
        node.inputs.iter().filter(|v| body.ty(**v) == body.ty(node.outputs[0])).copied().collect();
    if node.op.is_leaf() || node.outputs.len() != 1 {
        return false;
    }
    let Some(kept) = pick(&fits, random) else { return false };
    body.substitute(&HashMap::from([(node.outputs[0], kept)]));
    // Inputs must stay inputs, whether they are read or not.
    body.outputs.iter().all(|o| !body.def(o.value).op.is_leaf())
}

fn transposed_matrix(body: &mut Graph, at: NodeId, _: &mut Random) -> bool {
    let (inputs, output) = (body.node(at).inputs.clone(), body.node(at).outputs[0]);
    let ty = body.ty(output).clone();
    let Op::MatMul(op) = &mut body.node_mut(at).op else { return false };
    (op.trans_a, op.trans_b) = (!op.trans_a, !op.trans_b);
    let op = Op::MatMul(op.clone());
    let types: Vec<_> = inputs.iter().map(|v| body.ty(*v)).collect();
    op.infer(&types).is_ok_and(|found| found[0] == ty)
}

fn other_reduction(body: &mut Graph, at: NodeId, _: &mut Random) -> bool {
    let Op::Reduce(op) = &mut body.node_mut(at).op else { return false };
    op.f = match op.f {
        ReduceFn::Sum => ReduceFn::Mean,
        ReduceFn::Mean => ReduceFn::Sum,
        _ => return false,
    };
    true
}

fn other_factor(body: &mut Graph, at: NodeId, random: &mut Random) -> bool {
    let factor = [0.5, 2.0, 0.9][random.below(3)];
    match &mut body.node_mut(at).op {
        Op::LossScale(op) => op.factor *= factor,
        Op::Unscale(op) => op.capacity *= factor,
        Op::RmsNorm(op) => op.eps += 1.0,
        Op::RmsNormGradInput(op) => op.axis = op.axis.saturating_sub(1),
        _ => return false,
    }
    let node = body.node(at);
    let types: Vec<_> = node.inputs.iter().map(|v| body.ty(*v)).collect();
    node.op
        .infer(&types)
        .is_ok_and(|all| all.iter().zip(&node.outputs).all(|(ty, output)| ty == body.ty(*output)))
}

fn exchanged_reads(plan: &mut Plan, random: &mut Random) -> bool {
    let tasks: Vec<TaskId> = plan.tasks.keys().collect();
    let Some(task) = pick(&tasks, random) else { return false };
    let Action::Kernel { reads, .. } = &mut plan.tasks[task].action else { return false };
    let pairs = (0..reads.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    let pairs: Vec<(usize, usize)> =
        pairs.filter(|(i, j)| reads[*i].ty == reads[*j].ty && reads[*i] != reads[*j]).collect();
    let Some((i, j)) = pick(&pairs, random) else { return false };
    reads.swap(i, j);
    true
}

fn zeroed(plan: &mut Plan, random: &mut Random) -> bool {
    let tasks: Vec<TaskId> = plan.tasks.keys().collect();
    let Some(task) = pick(&tasks, random) else { return false };
    let places = plan.tasks[task].action.writes().into_iter().cloned().collect();
    plan.tasks[task].action = Action::Zero { places };
    true
}

fn other_collective(plan: &mut Plan, random: &mut Random) -> bool {
    let is = |t: &TaskId| {
        matches!(plan.tasks[*t].action, Action::ReduceScatter { .. } | Action::AllReduce { .. })
    };
    let tasks: Vec<TaskId> = plan.tasks.keys().filter(is).collect();
    let Some(task) = pick(&tasks, random) else { return false };
    match &mut plan.tasks[task].action {
        Action::ReduceScatter { reduce, .. } | Action::AllReduce { reduce, .. } => {
            *reduce = match *reduce {
                ReduceKind::Sum => ReduceKind::Mean,
                _ => ReduceKind::Sum,
            };
        }
        _ => return false,
    }
    true
}

fn other_hyper(plan: &mut Plan, random: &mut Random) -> bool {
    let n = plan.hyper.len();
    let hyper = &mut plan.hyper[random.below(n)];
    hyper.value = [0.5, 1.5][random.below(2)] * hyper.value + 0.01;
    true
}

fn other_state(plan: &mut Plan, random: &mut Random) -> bool {
    let n = plan.states.len();
    plan.states[random.below(n)].init += 1.0;
    true
}

/// The numbers of two steps by name.
fn numbers(recorded: &Recorded) -> BTreeMap<String, Vec<f64>> {
    let mut all = BTreeMap::new();
    for (k, step) in recorded.steps.iter().enumerate() {
        for (name, values) in &step.after {
            all.insert(format!("{k} {name}"), values.clone());
        }
        for (name, values) in &step.gradients {
            let wide = values.iter().map(|x| f64::from(*x)).collect();
            all.insert(format!("{k} gradient {name}"), wide);
        }
        for (name, value) in &step.metrics {
            all.insert(format!("{k} metric {}", name.word()), vec![*value]);
        }
    }
    all
}

/// The largest change of a tensor, relative to its norm.
fn change(a: &Recorded, b: &Recorded) -> f64 {
    let (a, b) = (numbers(a), numbers(b));
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let one = |(name, a): (&String, &Vec<f64>)| {
        let Some(b) = b.get(name).filter(|b| b.len() == a.len()) else { return f64::INFINITY };
        let apart = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
        let size = norm(&mut a.iter().copied()).max(norm(&mut b.iter().copied()));
        match apart {
            0.0 => 0.0,
            apart if apart.is_finite() => apart / size,
            _ => f64::INFINITY,
        }
    };
    a.iter().map(one).fold(0.0, f64::max)
}

/// Two steps of a plan on the same data, from the same parameters.
fn recorded(path: &Path, data: &Path, params: &BTreeMap<String, Vec<u8>>) -> Option<Recorded> {
    let dir = PlanDir::load(path).ok()?;
    let data = Data::load(&Source::new(vec![data.into()], None), &dir.plan).ok()?;
    let options = record::Options {
        params: params.clone(),
        steps: 2,
        threads: Some(1),
        ..record::Options::default()
    };
    record(&dir, &data, &options).ok()
}

/// Random examples for all inputs of the model.
fn data(planned: &Planned, path: &Path) {
    let plan = &planned.compiled.plan;
    let n = 2 * plan.world_size * plan.accumulation;
    let mut random = fastrand::Rng::with_seed(3);
    let mut tensor = |most: i64| -> Vec<u8> {
        (0..3 * n).flat_map(|_| random.i64(0..most).to_le_bytes()).collect()
    };
    let (ids, labels) = (tensor(7), tensor(5));
    let view = |bytes| {
        let dtype = safetensors::Dtype::I64;
        safetensors::tensor::TensorView::new(dtype, vec![n, 3], bytes).expect("fits")
    };
    let views = [("ids", view(&ids)), ("labels", view(&labels))];
    safetensors::serialize_to_file(views, None, path).expect("written");
}

/// The parameters of a plan, with what is the same everywhere spread.
fn params(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let dir = PlanDir::load(path).expect("a plan");
    let mut random = fastrand::Rng::with_seed(5);
    let names = dir.plan.params.iter().map(|p| p.name.clone());
    let spread = |name: String| {
        let bytes = dir.weight(&name).expect("read").expect("a value").into_owned();
        let spread = |x: &[u8; 4]| f32::from_le_bytes(*x) + 0.05 * (random.f32() - 0.5);
        let moved = bytes.as_chunks::<4>().0.iter().map(spread);
        (name, moved.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    names.map(spread).collect()
}

fn audited(plan: &Path, data: &Path) -> Result<Audit, Report> {
    let data = Source::new(vec![data.into()], None);
    audit(&Options { data, directions: 4, ..options(plan) })
}

fn plans() -> Vec<Planned> {
    let fp32 = "precision.compute=fp32";
    let lively = ["optimizer.lr=0.05", "optimizer.weight_decay=0.3"];
    [
        &["optimizer.clip_grad_norm=0"][..],
        &["sharding.ranks=2", "run.accumulation=2", "optimizer.ema=0.5"],
        &["sharding.ranks=3", "sharding.strategy=no_shard", "optimizer.kind=momentum"],
        &["optimizer.kind=lion", "run.accumulation=2", "memory.recompute=unit"],
    ]
    .map(|more| small(&[&[fp32], &lively[..], more].concat(), ""))
    .into()
}

#[test]
fn an_audit_catches_what_a_plan_computes_wrong() {
    let mutants = std::env::var("FRIT_AUDIT_MUTANTS").ok().and_then(|n| n.parse().ok());
    let mutants: usize = mutants.unwrap_or(MUTANTS);
    let plans = plans();
    let (mut harmless, mut refused, mut missed) = (0, 0, Vec::new());
    let mut caught: BTreeMap<&str, usize> = BTreeMap::new();
    let mut ways: BTreeMap<&str, usize> = BTreeMap::new();
    let is_wrong = |a: &Agreement| a.verdict == Verdict::Wrong;
    let files: Vec<_> = plans
        .iter()
        .map(|planned| {
            let file = planned.dir.path().join("data.safetensors");
            data(planned, &file);
            let params = params(&planned.path());
            let base = recorded(&planned.path(), &file, &params).expect("it runs");
            let unchanged = audited(&planned.path(), &file).unwrap_or_else(|e| panic!("{e}"));
            assert!(unchanged.wrong().is_empty(), "{:#?}", unchanged.wrong());
            (file, params, base)
        })
        .collect();
    for number in 0..mutants {
        let mut random = Random::new(number as u64);
        let at = number % plans.len();
        let (planned, (file, params, base)) = (&plans[at], &files[at]);
        let (kind, change_plan) = KINDS[number / plans.len() % KINDS.len()];
        let whole = &planned.compiled.plan;
        let mut plan = whole.clone();
        let changed = (0..200).any(|_| {
            plan = whole.clone();
            change_plan(&mut plan, &mut random) && plan != *whole
        });
        if !changed || check(&plan).is_err() {
            refused += 1;
            continue;
        }
        let path = planned.path();
        std::fs::write(path.join("plan.json"), seal(&plan.to_json())).expect("written");
        let Some(found) = recorded(&path, file, params) else {
            refused += 1;
            continue;
        };
        let by = change(base, &found);
        if by < CHANGED {
            harmless += 1;
            continue;
        }
        let found = match audited(&path, file) {
            Ok(found) => found,
            Err(error) => {
                // Gradients that are never finite.
                assert_eq!(error.exit_code(), 1, "{error}");
                *caught.entry(kind).or_default() += 1;
                continue;
            }
        };
        let wrong = found.wrong();
        if wrong.is_empty() {
            let page = found.render(false);
            missed.push(format!("mutant {number} of plan {at}, {kind}, by {by:.1e}\n{page}"));
            continue;
        }
        *caught.entry(kind).or_default() += 1;
        let mut one_rank = found.one_rank.iter().flatten();
        for (by, is_wrong) in [
            ("gradients", found.gradients.iter().any(|g| g.verdict == Verdict::Wrong)),
            ("step", found.step.iter().any(is_wrong)),
            ("updates", found.updates.iter().any(is_wrong)),
            ("one rank", one_rank.any(is_wrong)),
            ("interpreter", found.interpreted.iter().flatten().any(is_wrong)),
        ] {
            *ways.entry(by).or_default() += usize::from(is_wrong);
        }
    }
    for planned in &plans {
        let text = planned.compiled.plan.to_json();
        std::fs::write(planned.path().join("plan.json"), text).expect("written");
    }
    let total: usize = caught.values().sum();
    eprintln!(
        "{mutants} mutants: {total} caught {caught:?}, {harmless} harmless, {refused} refused"
    );
    eprintln!("found by {ways:?}");
    assert!(missed.is_empty(), "{} of {} missed: {}", missed.len(), total, missed.join("\n"));
    assert!(total * 3 >= mutants, "only {total} of {mutants} change a result");
}

#[test]
fn code_that_is_not_its_body_is_caught_and_the_exit_code_is_1() {
    let planned = small(&["precision.compute=fp32"], "");
    let mut plan = planned.compiled.plan.clone();
    // What the body says is no longer what the code does: the body of a routine is changed, and the routine stays.
    let is = |k: &Kernel| {
        let float = k.body.outputs.iter().all(|o| k.body.ty(o.value).dtype.is_float());
        float && matches!(k.entry, Entry::Routine(_))
    };
    let k = plan.kernels.position(is).expect("a kernel by a routine");
    let mut body = plan.kernels[k].body.clone();
    let value = body.outputs[0].value;
    let (origin, region) = (body.def(value).origin.clone(), body.def(value).region);
    let negated = body.add1(Op::Unary(UnaryFn::Neg), &[value], origin, region).expect("a node");
    body.outputs[0].value = negated;
    plan.kernels[k].body = body;
    plan.kernels[k].bind();
    std::fs::write(planned.path().join("plan.json"), seal(&plan.to_json())).expect("written");
    let dir = planned.path();
    let path = dir.to_str().expect("text");
    let cli = Cli::try_parse_from(["frit", "audit", path]).expect("a command");
    let error = execute(&cli).expect_err("the code is not the body");
    assert_eq!((error.diagnostics[0].code.as_str(), error.exit_code()), ("E116", 1), "{error}");
    assert!(error.to_string().contains("interpreter"), "{error}");
}
