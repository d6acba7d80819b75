//! Updates: sums over micro-steps, clipping, skipped steps, schedules, optimizers, groups and the moving average.

use super::super::{Group, Update, matrices, updated};
use super::formulas::{Trained, learning_rate};
use super::{Model, Ranks, Tensors, close, floats, random};
use frit_ir::ops::{
    AdjustLr, BinaryFn, Cast, Constant, Embedding, LossScale, MatMul, MuonRule, OptimizerKind,
    ParamKind, Reduce, ReduceFn, ScheduleKind, State, StateName, Transpose, UnaryFn,
};
use frit_ir::{DType, Op, OutputKind, Tensor, TensorType, ValueId};

/// Elements of the loss that count in a micro-step, of twice as many.
pub(super) const EXAMPLES: f64 = 3.0;

/// The configuration's defaults, with another optimizer, and no clipping.
pub(super) fn plain(optimizer: &str) -> Update {
    let hypers = [
        ("optimizer.lr", 0.1),
        ("optimizer.beta1", 0.9),
        ("optimizer.beta2", 0.99),
        ("optimizer.eps", 1e-3),
        ("optimizer.weight_decay", 0.02),
        ("optimizer.momentum", 0.8),
        ("optimizer.dampening", 0.3),
        ("optimizer.decay_exponent", 0.8),
        ("optimizer.relative_eps", 1e-3),
        ("optimizer.update_threshold", 0.7),
        ("optimizer.muon_momentum", 0.95),
        ("optimizer.muon_ns_a", 3.4445),
        ("optimizer.muon_ns_b", -4.775),
        ("optimizer.muon_ns_c", 2.0315),
        ("optimizer.muon_ns_eps", 1e-7),
        ("optimizer.clip_grad_norm", 0.0),
        ("optimizer.clip_grad_value", 0.0),
        ("optimizer.ema", 0.6),
        ("schedule.warmup_steps", 0.0),
        ("schedule.total_steps", 0.0),
        ("schedule.min_lr", 0.01),
        ("schedule.step_size", 2.0),
        ("schedule.gamma", 0.5),
        ("schedule.pct_start", 0.5),
        ("schedule.div_factor", 10.0),
        ("schedule.final_div_factor", 100.0),
        ("precision.growth_factor", 4.0),
        ("precision.backoff_factor", 0.25),
        ("precision.growth_interval", 2.0),
    ];
    Update {
        optimizer: OptimizerKind::of(optimizer).expect("an optimizer"),
        muon: MuonRule::default(),
        matrices: ["h.a".into()].into(),
        schedule: ScheduleKind::Constant,
        hypers: hypers.map(|(key, x)| (key.to_string(), x)).into(),
        groups: vec![],
        ema: true,
        init_scale: 1.0,
        dynamic_scale: false,
        accumulation: 1,
        capacity: 2.0 * EXAMPLES,
        ranks: 1,
        reproducible: false,
    }
}

/// Adds gradients of these parameters, inputs times the factor of the loss, which is an input too, over these elements.
fn with_gradients(m: &mut Model, params: &[ValueId], loss: ValueId, elements: f64) {
    let ty = TensorType::scalar(DType::F32);
    let state = State { name: StateName::LossScale, of: None, ty, init: 1.0, sharded: false };
    let scale = m.op(Op::State(state), &[]);
    let seed = m.op(Op::LossScale(LossScale { factor: 1.0 / elements }), &[scale]);
    for param in params {
        let Op::Param(p) = m.0.def(*param).op.clone() else { panic!("a parameter") };
        let d = m.input(&format!("d_{}", p.name), DType::F32, p.ty.shape.dims());
        let gradient = m.op(Op::Binary(BinaryFn::Mul), &[d, seed]);
        m.0.add_output(&p.name, gradient, OutputKind::Gradient);
    }
    let count = m.input("count", DType::F32, &[]);
    m.0.add_output("loss_sum", loss, OutputKind::LossSum);
    m.0.add_output("loss_count", count, OutputKind::LossCount);
}

/// Adds one parameter `w` of two elements with its gradient.
pub(super) fn with_gradient(mut m: Model, elements: f64) -> Model {
    let w = m.param("w", ParamKind::Trainable, TensorType::new(DType::F32, [2]));
    let loss = m.input("loss", DType::F32, &[]);
    with_gradients(&mut m, &[w], loss, elements);
    m
}

/// Two matrices of which the first is of a hidden layer, and a vector.
const PARAMS: [(&str, &[usize]); 3] = [("h.a", &[3, 4]), ("h.b", &[4, 2]), ("bias", &[2])];

/// A model that reads them, with gradients.
fn model(elements: f64) -> Model {
    let mut m = Model::new();
    let params = PARAMS
        .map(|(name, dims)| m.param(name, ParamKind::Trainable, TensorType::new(DType::F32, dims)));
    let [a, b, bias] = params;
    let x = m.input("x", DType::F32, &[1, 3]);
    let h = m.op(Op::MatMul(MatMul::default()), &[x, a]);
    let h = m.op(Op::Unary(UnaryFn::Tanh), &[h]);
    let y = m.op(Op::MatMul(MatMul::default()), &[h, b]);
    let y = m.op(Op::Binary(BinaryFn::Add), &[y, bias]);
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![0, 1], keep_dims: false };
    let y = m.op(Op::Reduce(sum), &[y]);
    // The loss is an input, and the model nothing.
    let zero = m.op(Op::Constant(Constant { value: Tensor::scalar(0.0) }), &[]);
    let nothing = m.op(Op::Binary(BinaryFn::Mul), &[y, zero]);
    let loss = m.input("loss", DType::F32, &[]);
    let loss = m.op(Op::Binary(BinaryFn::Add), &[loss, nothing]);
    with_gradients(&mut m, &params, loss, elements);
    m
}

/// Trains for some steps and compares parameters, states and metrics after each with the formulas.
fn check(what: &str, update: &Update, settings: [(OptimizerKind, f64, f64); 3]) {
    let u = update;
    let n_micro_steps = u.accumulation;
    let graph = model(u.capacity * n_micro_steps as f64).0;
    let graph = updated(&graph, u).expect("stated");
    let mut ranks = Ranks::new(graph, 1);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut params: Vec<Trained> = PARAMS
        .iter()
        .zip(settings)
        .map(|((_, dims), (kind, lr, decay))| {
            let n: usize = dims.iter().product();
            let of_state = match (kind, *dims) {
                (OptimizerKind::Adafactor, [rows, cols]) => rows + cols,
                _ => n,
            };
            Trained {
                dims: dims.to_vec(),
                kind,
                lr,
                decay,
                p: random(&mut rng, n),
                states: vec![vec![0.0; of_state]; kind.n_states()],
                average: vec![0.0; n],
            }
        })
        .collect();
    for ((name, shape), param) in PARAMS.iter().zip(&params) {
        ranks.states[0].insert(name.to_string(), floats(shape, &param.p));
    }
    let (mut t, mut scale, mut good) = (0.0, u.init_scale, 0.0);
    for step in 0..6 {
        let fails = step == 2;
        let mut means: Vec<Vec<f64>> = params.iter().map(|p| vec![0.0; p.p.len()]).collect();
        let count = EXAMPLES * n_micro_steps as f64;
        let (mut inputs, mut loss) = (vec![], 0.0);
        for i in 0..n_micro_steps {
            let of_micro_step = rng.f64();
            loss += of_micro_step / count;
            let mut feeds = Tensors::from([
                ("x".to_string(), floats(&[1, 3], &[0.0; 3])),
                ("loss".to_string(), floats(&[], &[of_micro_step])),
                ("count".to_string(), floats(&[], &[EXAMPLES])),
            ]);
            for ((name, shape), mean) in PARAMS.iter().zip(&mut means) {
                let mut d = random(&mut rng, mean.len());
                mean.iter_mut().zip(&d).for_each(|(m, d)| *m += d / count);
                if fails && i == 0 && *name == "h.b" {
                    d[1] = f64::INFINITY;
                }
                feeds.insert(format!("d_{name}"), floats(shape, &d));
            }
            inputs.push(vec![feeds]);
        }
        let metrics = ranks.step(&inputs);
        let norm = means.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
        let h = |key: &str| u.hypers[key];
        let limit = h("optimizer.clip_grad_norm");
        let factor = if limit == 0.0 { 1.0 } else { (limit / (norm + 1e-6)).min(1.0) };
        let most = h("optimizer.clip_grad_value");
        let clipped = |g: &f64| match most == 0.0 {
            true => g * factor,
            false => (g * factor).clamp(-most, most),
        };
        let lr = learning_rate(u, h("optimizer.lr"), t);
        for (name, expected) in [
            ("loss", loss),
            ("lr", lr),
            ("loss_scale", scale),
            ("found_inf", f64::from(u8::from(fails))),
            ("tokens", count),
        ] {
            close(&[metrics[name]], &[expected], &format!("{what}: {name} of step {step}"));
        }
        if fails {
            (scale, good) = (scale * h("precision.backoff_factor"), 0.0);
        } else {
            close(&[metrics["grad_norm"]], &[norm], &format!("{what}: norm of step {step}"));
            for (param, mean) in params.iter_mut().zip(&means) {
                let g: Vec<f64> = mean.iter().map(clipped).collect();
                param.step(u, &g, t);
            }
            t += 1.0;
            good += 1.0;
            if good == h("precision.growth_interval") {
                (scale, good) = (scale * h("precision.growth_factor"), 0.0);
            }
        }
        if !u.dynamic_scale {
            scale = u.init_scale;
        }
        close(&ranks.value(0, "step"), &[t], &format!("{what}: step"));
        for ((name, _), param) in PARAMS.iter().zip(&params) {
            let at = |x: &str| format!("{what}: {x} of {name} after step {step}");
            close(&ranks.value(0, name), &param.p, &at("value"));
            if u.ema {
                let average = ranks.value(0, &format!("ema.{name}"));
                close(&average, &param.average, &at("average"));
            }
            for (state, expected) in param.kind.states(name).iter().zip(&param.states) {
                let key = match param.kind {
                    OptimizerKind::Adafactor => state.to_string(),
                    _ => format!("{state}.{name}"),
                };
                close(&ranks.value(0, &key), expected, &at(&key));
            }
        }
    }
}

/// Rule, learning rate and weight decay of each parameter where none has settings of its own.
fn usual(update: &Update) -> [(OptimizerKind, f64, f64); 3] {
    let (lr, decay) = (update.hypers["optimizer.lr"], update.hypers["optimizer.weight_decay"]);
    let kind = update.optimizer;
    // Muon steps the first matrix alone: the second is of the last layer.
    let other = if kind == OptimizerKind::Muon { OptimizerKind::Adamw } else { kind };
    [kind, other, other].map(|kind| (kind, lr, decay))
}

#[test]
fn optimizers_step_by_their_rules() {
    for word in OptimizerKind::WORDS {
        let update = plain(word);
        check(word, &update, usual(&update));
    }
}

#[test]
fn muon_has_variants() {
    for (nesterov, ns_steps, adjust_lr) in
        [(false, 1, AdjustLr::MatchRmsAdamw), (true, 3, AdjustLr::SpectralUnclamped)]
    {
        let update = Update { muon: MuonRule { nesterov, ns_steps, adjust_lr }, ..plain("muon") };
        check(&format!("{:?}", update.muon), &update, usual(&update));
    }
}

#[test]
fn gradients_are_summed_unscaled_and_clipped() {
    for (accumulation, dynamic_scale, init_scale, norm, value) in [
        (1, false, 64.0, 0.5, 0.0),
        (2, false, 1.0, 0.0, 0.25),
        (2, true, 1024.0, 0.7, 0.2),
        (3, true, 8.0, 1e6, 0.0),
    ] {
        for word in ["sgd", "adamw", "muon"] {
            let mut update =
                Update { accumulation, dynamic_scale, init_scale, ema: false, ..plain(word) };
            update.hypers.insert("optimizer.clip_grad_norm".into(), norm);
            update.hypers.insert("optimizer.clip_grad_value".into(), value);
            let what = format!("{word}, A = {accumulation}, clipped to {norm} and {value}");
            check(&what, &update, usual(&update));
        }
    }
}

#[test]
fn rates_follow_their_schedule() {
    for &schedule in ScheduleKind::ALL {
        for warmup in [0.0, 2.0] {
            let mut update = Update { schedule, ..plain("sgd") };
            update.hypers.insert("schedule.warmup_steps".into(), warmup);
            update.hypers.insert("schedule.total_steps".into(), 6.0);
            check(&format!("{schedule} after {warmup}"), &update, usual(&update));
        }
    }
}

#[test]
fn parameters_have_settings_of_their_own() {
    let group = |scope: &str, kind| Group { scope: scope.into(), kind };
    let with = |word: &str, groups: Vec<Group>, hypers: &[(&str, f64)]| {
        let mut update = Update { groups, ..plain(word) };
        update.hypers.extend(hypers.iter().map(|(key, x)| (format!("optimizer.{key}"), *x)));
        update
    };
    let sgd = OptimizerKind::Sgd;
    let groups = vec![group("h", None), group("**.b*", None), group("**", None)];
    let hypers = [("group.0.lr", 0.5), ("group.0.weight_decay", 0.0), ("group.1.lr", 0.25)];
    let update = with("sgd", groups.clone(), &hypers);
    check("groups", &update, [(sgd, 0.5, 0.0), (sgd, 0.25, 0.0), (sgd, 0.25, 0.02)]);
    // Vectors do not decay, unless a group says so.
    let update = with("sgd", vec![], &[("weight_decay_of_vectors", 0.0)]);
    check("vectors", &update, [(sgd, 0.1, 0.02), (sgd, 0.1, 0.02), (sgd, 0.1, 0.0)]);
    let hypers = [("weight_decay_of_vectors", 0.0), ("group.2.weight_decay", 0.3)];
    let update = with("sgd", groups, &hypers);
    check("vectors of a group", &update, [(sgd, 0.1, 0.3); 3]);
    // What AdamW steps beside Muon, and which that is.
    let (muon, adamw) = (OptimizerKind::Muon, OptimizerKind::Adamw);
    let own = [("adamw_lr", 0.01), ("adamw_weight_decay", 0.4)];
    let update = with("muon", vec![], &own);
    check("beside", &update, [(muon, 0.1, 0.02), (adamw, 0.01, 0.4), (adamw, 0.01, 0.4)]);
    let groups = vec![group("h.*", Some(muon)), group("h.a", Some(adamw)), group("**", None)];
    let hypers = [own[0], own[1], ("group.1.lr", 0.2), ("weight_decay_of_vectors", 0.0)];
    let update = with("muon", groups, &hypers);
    check("asked for", &update, [(adamw, 0.2, 0.4), (muon, 0.1, 0.02), (adamw, 0.01, 0.0)]);
    // Without Muon these keys say nothing.
    let update = with("adamw", vec![group("**", Some(muon))], &own);
    check("no muon", &update, [(adamw, 0.1, 0.02); 3]);
}

#[test]
fn matrices_of_hidden_layers_are_found() {
    let mut m = Model::new();
    let names = ["embedding", "first", "turned", "shared", "added", "last", "tied"];
    let [embedding, first, turned, shared, added, last, tied] =
        names.map(|name| m.param(name, ParamKind::Trainable, TensorType::new(DType::F32, [4, 4])));
    let frozen = m.param("frozen", ParamKind::Frozen, TensorType::new(DType::F32, [4, 4]));
    let stacked = m.param("stacked", ParamKind::Trainable, TensorType::new(DType::F32, [2, 4, 4]));
    let tokens = m.input("tokens", DType::I64, &[2]);
    let matmul = |m: &mut Model, x, w| m.op(Op::MatMul(MatMul::default()), &[x, w]);
    let add = |m: &mut Model, a, b| m.op(Op::Binary(BinaryFn::Add), &[a, b]);
    let x = m.op(Op::Embedding(Embedding::default()), &[embedding, tokens]);
    let looked_up = m.op(Op::Embedding(Embedding::default()), &[tied, tokens]);
    let x = add(&mut m, x, looked_up);
    let x = matmul(&mut m, x, first);
    let transposed = m.op(Op::Transpose(Transpose { perm: vec![1, 0] }), &[turned]);
    let low = m.op(Op::Cast(Cast { to: DType::BF16 }), &[transposed]);
    let back = m.op(Op::Cast(Cast { to: DType::F32 }), &[low]);
    let x = matmul(&mut m, x, back);
    let wide = matmul(&mut m, x, stacked);
    let sum = Reduce { f: ReduceFn::Sum, axes: vec![0], keep_dims: false };
    let x = m.op(Op::Reduce(sum), &[wide]);
    let x = matmul(&mut m, x, shared);
    let x = matmul(&mut m, x, added);
    let both = m.op(Op::Unary(UnaryFn::Tanh), &[added]);
    let x = matmul(&mut m, x, both);
    // The last layers are side by side; a frozen matrix is a layer, too.
    let a = matmul(&mut m, x, last);
    let b = matmul(&mut m, x, shared);
    let c = matmul(&mut m, x, tied);
    let y = add(&mut m, a, b);
    let y = add(&mut m, y, c);
    let all = Reduce { f: ReduceFn::Sum, axes: vec![0, 1], keep_dims: false };
    let loss = m.op(Op::Reduce(all), &[y]);
    m.0.add_output("loss_sum", loss, OutputKind::LossSum);
    let found = |m: &Model| {
        let found = matrices(&m.0);
        names.into_iter().filter(|name| found.contains(*name)).collect::<Vec<_>>()
    };
    assert_eq!(found(&m), ["first", "turned"]);
    // Behind another layer the last one is hidden.
    let z = matmul(&mut m, y, frozen);
    let all = Reduce { f: ReduceFn::Sum, axes: vec![0, 1], keep_dims: false };
    let loss = m.op(Op::Reduce(all), &[z]);
    m.0.outputs[0].value = loss;
    assert_eq!(found(&m), ["first", "turned", "shared", "last"]);
}

#[test]
fn what_has_no_statement_is_named() {
    let unstated =
        |m: &Model, update: &Update| updated(&m.0, update).expect_err("unstated").to_string();
    let m = model(1.0);
    let mut update = plain("adam");
    update.hypers.remove("optimizer.beta2");
    let expected = "no statement of `update` at the graph: `optimizer.beta2` has no value";
    assert_eq!(unstated(&m, &update), expected);
    let muon = Group { scope: "bias".into(), kind: Some(OptimizerKind::Muon) };
    let update = Update { groups: vec![muon], ..plain("muon") };
    let found = unstated(&m, &update);
    assert!(found.contains("muon steps matrices only"), "{found}");
    let mut m = model(1.0);
    m.0.outputs.retain(|o| o.kind != OutputKind::LossCount);
    let found = unstated(&m, &plain("sgd"));
    assert!(found.contains("the graph has no LossCount"), "{found}");
}
