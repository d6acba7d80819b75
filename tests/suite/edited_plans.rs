//! Edited plans: every number, text and list of a `plan.json` is changed in turn. An edit is either refused with a
//! message before use, or the plan can be inspected, compared, reported and simulated.
//!
//! `FRIT_EDITS=all` tries every edit instead of a sample.

use crate::machine::Random;
use crate::support::{file, plan, plan_at, plan_to_evaluate};
use clap::Parser;
use frit_ir::ops::StateName;
use frit_ir::plan::{
    BufferId, Candidate, Entry, EvalMetric, GeneratedLaunch, GroupId, KernelId, KernelKind, Launch,
    ParamId, PhaseId, PhaseName, Plan, Pointer, TaskId, UnitId, check, seal, sha256_hex,
};
use frit_passes::verify_plan::verify_plan;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Edits of one plan that are tried, unless all are.
const SAMPLE: usize = 250;

/// The plans: several ranks, accumulation, low precision, offload, and an evaluation.
fn plans() -> Vec<Plan> {
    let mlp = "tests/models/mlp/model.onnx";
    let gpt2 = ["sharding.ranks=4", "precision.compute=bf16", "run.accumulation=2"];
    let evaluation = plan_to_evaluate(mlp, 4, &["sharding.ranks=2"]).compiled.evaluation;
    vec![
        plan(mlp, 4, &["sharding.ranks=2"]).compiled.plan,
        plan("tests/models/gpt2/model.onnx", 2, &gpt2).compiled.plan,
        evaluation.expect("an evaluation").plan,
        plan(mlp, 4, &["sharding.ranks=2", "memory.offload=optimizer", "optimizer.kind=adafactor"])
            .compiled
            .plan,
    ]
}

/// A value in place of another one, by name of the edit.
fn edits(value: &Value) -> Vec<(&'static str, Value)> {
    let number = |x: u64| Value::from(x);
    match value {
        Value::Number(n) => {
            let next = n.as_u64().map_or(Value::from(n.as_f64().unwrap_or(0.0) + 1.0), |n| {
                number(n.wrapping_add(1))
            });
            vec![
                ("0", number(0)),
                ("-1", Value::from(-1)),
                ("1", number(1)),
                ("n + 1", next),
                ("2^31", number(1 << 31)),
                ("2^53", number(1 << 53)),
                ("2^63", number(1 << 63)),
                ("2^64 - 1", number(u64::MAX)),
                ("1e300", Value::from(1e300)),
            ]
        }
        Value::String(text) => {
            vec![("text", "another".into()), ("longer", format!("{text}!").into())]
        }
        Value::Array(items) if !items.is_empty() => {
            let doubled = items.iter().chain(items).cloned().collect();
            let mut swapped = items.clone();
            let last = swapped.len() - 1;
            swapped.swap(0, last);
            vec![
                ("empty", Value::Array(vec![])),
                ("doubled", Value::Array(doubled)),
                ("shorter", Value::Array(items[..last].to_vec())),
                ("swapped", Value::Array(swapped)),
            ]
        }
        Value::Bool(b) => vec![("not", Value::Bool(!b))],
        _ => vec![],
    }
}

/// Every place of a value, as a JSON pointer. Of a list the first, the last and some in between: the others
/// are of the same kind.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.into());
    match value {
        Value::Object(fields) => {
            for (key, value) in fields.iter().filter(|(key, _)| !is_prose(key)) {
                places(value, &format!("{at}/{key}"), found);
            }
        }
        Value::Array(items) => {
            let n = items.len();
            let wanted = |i: usize| i < 4 || i + 3 > n || i.is_multiple_of(n.div_ceil(8));
            for (i, value) in items.iter().enumerate().filter(|(i, _)| wanted(*i)) {
                places(value, &format!("{at}/{i}"), found);
            }
        }
        _ => {}
    }
}

/// What is only read by people.
fn is_prose(key: &str) -> bool {
    matches!(key, "reports" | "lints" | "config" | "origin" | "reason")
}

/// Everything that reads a plan and runs nothing of it.
fn read_by_all(dir: &Path, other: &Path, plan: &Plan) {
    // Whatever is found, it is found without a panic.
    let _ = verify_plan(plan);
    let commands = |path: &str| {
        let mut all = vec![
            vec!["diff", path, other.to_str().expect("UTF-8")],
            vec!["simulate", path, "--cluster", "h100"],
        ];
        all.push(vec!["diff", other.to_str().expect("UTF-8"), path, "--json"]);
        for view in ["summary", "units", "casts", "schedule", "memory", "kernels", "lints", "graph"]
        {
            all.push(vec!["inspect", path, "--view", view]);
        }
        all.into_iter().map(|c| c.into_iter().map(String::from).collect()).collect::<Vec<Vec<_>>>()
    };
    let page = dir.join("page.html").to_str().expect("UTF-8").to_string();
    let path = dir.to_str().expect("UTF-8");
    let report = ["report", path, "-o", &page].map(String::from).to_vec();
    for command in commands(path).into_iter().chain([report]) {
        let arguments = std::iter::once("frit".to_string()).chain(command);
        let cli = frit::commands::Cli::try_parse_from(arguments).expect("a command");
        let _ = frit::commands::execute(&cli);
    }
}

/// Reads an edited plan; whether it was accepted.
fn accepted(edited: &Value, dir: &Path, other: &Path) -> bool {
    let text = seal(&serde_json::to_string_pretty(edited).expect("JSON"));
    let Ok(plan) = Plan::from_json(&text) else { return false };
    std::fs::write(dir.join("plan.json"), &text).expect("written");
    read_by_all(dir, other, &plan);
    verify_plan(&plan).is_ok()
}

#[test]
fn every_edit_is_refused_or_harmless_to_readers() {
    let all = std::env::var("FRIT_EDITS").is_ok_and(|v| v == "all");
    let keep = std::env::var_os("FRIT_EDITS_KEEP");
    let dir = tempfile::tempdir().expect("a directory");
    let (edited, other) = (dir.path().join("edited"), dir.path().join("other"));
    for (k, plan) in plans().into_iter().enumerate() {
        for path in [&edited, &other] {
            std::fs::create_dir_all(path).expect("a directory");
            std::fs::write(path.join("plan.json"), plan.to_json()).expect("written");
        }
        let whole = serde_json::to_value(&plan).expect("JSON");
        let mut found = Vec::new();
        places(&whole, "", &mut found);
        let mut tries: Vec<(&str, &'static str, Value)> = Vec::new();
        for place in &found {
            let value = whole.pointer(place).expect("a value");
            tries.extend(edits(value).into_iter().map(|(what, new)| (place.as_str(), what, new)));
        }
        let mut random = Random::new(k as u64);
        if !all {
            let keep = SAMPLE.min(tries.len());
            tries = (0..keep).map(|_| tries[random.below(tries.len())].clone()).collect();
        }
        let (n, mut kept) = (tries.len(), 0);
        for (place, what, new) in tries {
            let mut changed = whole.clone();
            *changed.pointer_mut(place).expect("a value") = new;
            let attempt = AssertUnwindSafe(|| accepted(&changed, &edited, &other));
            let verdict = catch_unwind(attempt);
            let verdict = verdict.unwrap_or_else(|_| panic!("plan {k}: {place} set to {what}"));
            if verdict && changed != whole {
                kept += 1;
                if let Some(keep) = &keep {
                    let name = format!("{k}_{}_{what}", place.replace('/', "."));
                    let text = seal(&serde_json::to_string_pretty(&changed).expect("JSON"));
                    std::fs::write(Path::new(keep).join(name), text).expect("written");
                }
            }
        }
        eprintln!("plan {k}: {n} edits, {kept} of them harmless");
    }
}

/// What indexes a table stays within it.
#[test]
fn indices_beyond_their_tables_are_refused() {
    let cases: [fn(&mut Plan); 16] = [
        |p| p.groups[GroupId(0)].unit = UnitId(36),
        |p| p.gradients[0].group = GroupId(37),
        |p| p.units.clear(),
        |p| p.groups.clear(),
        |p| p.params.clear(),
        |p| p.kernels.clear(),
        |p| p.buffers.truncate(3),
        |p| p.groups[GroupId(0)].numel = usize::MAX,
        |p| p.groups[GroupId(0)].shard_numel = 0,
        |p| p.metrics[0].place.buffer = BufferId(usize::MAX),
        |p| p.metrics[0].place.offset = usize::MAX - 3,
        |p| p.loss_capacity = usize::MAX / 2,
        |p| p.world_size = 1 << 62,
        |p| p.tasks[TaskId::FIRST].cost_us = f64::INFINITY,
        |p| p.tasks[TaskId::FIRST].flops = u64::MAX,
        |p| p.hyper[0].value = f64::NAN,
    ];
    let plan = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]).compiled.plan;
    for (i, change) in cases.into_iter().enumerate() {
        let mut broken = plan.clone();
        change(&mut broken);
        let found = check(&broken).map(|()| format!("case {i} is accepted"));
        found.expect_err("malformed");
        assert_eq!(verify_plan(&broken).expect_err("malformed")[0].code, "P001", "case {i}");
    }
}

/// A word that is none of a closed set is refused by name, with those that are, although the file is sealed.
#[test]
fn words_that_no_plan_knows_are_refused() {
    let [trained, .., evaluation, _] = &plans()[..] else { panic!("too few plans") };
    let cases = [
        (trained, "/phases/0/name", "`another`, expected one of `unshard`, `micro_step`"),
        (trained, "/target/device", "`another`, expected `cpu` or `cuda`"),
        (trained, "/strategy", "`another`, expected one of `full_shard`"),
        (trained, "/states/0/name", "unknown state `another`, expected one of `adam_m`"),
        (trained, "/groups/0/states/0/name", "unknown state `another`, expected one of `adam_m`"),
        (trained, "/metrics/0/name", "`another`, expected one of `loss`, `grad_norm`"),
        (evaluation, "/phases/0/name", "`another`, expected one of `unshard`, `micro_step`"),
        (
            evaluation,
            "/eval/metrics/0/name",
            "unknown metric `another`, expected one of `accuracy`",
        ),
    ];
    for (plan, place, expected) in cases {
        let mut edited: Value = serde_json::from_str(&plan.to_json()).expect("JSON");
        edited.as_object_mut().expect("an object").shift_remove("sha256");
        *edited.pointer_mut(place).expect(place) = "another".into();
        let text = seal(&serde_json::to_string(&edited).expect("JSON"));
        let error = Plan::from_json(&text).expect_err(place).to_string();
        assert!(error.contains(expected), "{place}: {error}");
    }
    let mut misplaced = trained.clone();
    misplaced.groups[GroupId(0)].states[0].name = StateName::Step;
    let error = check(&misplaced).expect_err("no state of elements").to_string();
    assert!(error.contains("`step` is no state of its elements"), "{error}");
    let mut swapped = trained.clone();
    swapped.phases[PhaseId(0)].name = PhaseName::Reduce;
    check(&swapped).expect_err("the phases are out of order");
}

/// Every state, and every metric of an evaluation, is read back from its text.
#[test]
fn names_are_read_back() {
    let states = [
        "adam_m",
        "muon_momentum",
        "rng",
        "adafactor_v.fc.weight",
        "buffer_change.bn.running_mean",
    ];
    for text in states {
        assert_eq!(text.parse::<StateName>().expect(text).to_string(), text);
    }
    for text in ["adafactor_v", "buffer_change", "adam_m.w", ""] {
        text.parse::<StateName>().expect_err(text);
    }
    let metrics =
        ["accuracy", "top_5", "perplexity(logits, labels)", "mean_absolute_error(a(1), b, c)"];
    for text in metrics {
        let metric = EvalMetric::try_from(text.to_string()).expect(text);
        assert_eq!(metric.to_string(), text);
    }
    for text in ["top_0", "top_", "accuracy(", "accuracy(a)", "precision", ""] {
        EvalMetric::try_from(text.to_string()).expect_err(text);
    }
}

/// Any edit of the file is found, unless whoever made it seals it anew.
#[test]
fn a_changed_file_is_refused() {
    let plan = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]).compiled.plan;
    let text = plan.to_json();
    assert_eq!(Plan::from_json(&text).expect("the plan"), plan);
    let lr = text.find("\"name\": \"optimizer.lr\"").expect("the learning rate");
    for at in [text.find("\"value\"").expect("a value") + 10, lr + 10, text.len() - 4] {
        let mut changed = text.clone().into_bytes();
        changed[at] = if changed[at] == b'1' { b'2' } else { b'1' };
        let changed = String::from_utf8(changed).expect("UTF-8");
        Plan::from_json(&changed).expect_err("it was changed");
    }
    let value = |change: fn(&mut Plan)| {
        let mut other = plan.clone();
        change(&mut other);
        other.to_json()
    };
    let first_values: [fn(&mut Plan); 4] = [
        |p| p.hyper[0].value += 1.0,
        |p| p.states[0].init += 1.0,
        |p| p.seed += 1,
        |p| p.params[ParamId(0)].digest = Some("another".into()),
    ];
    for change in first_values {
        assert_ne!(sha256_hex(value(change).as_bytes()), sha256_hex(text.as_bytes()));
    }
}

/// A kernel is called as its code was made, or not at all.
#[test]
fn an_entry_is_bound_to_its_body() {
    let cuda = ["target.device=cuda", "target.arch=sm_90", "optimizer.kind=adamw"];
    for settings in [&["sharding.ranks=2"][..], &cuda] {
        let plan = plan("tests/models/mlp/model.onnx", 4, settings).compiled.plan;
        check(&plan).expect("well-formed");
        let refused = |change: &dyn Fn(&mut Entry)| {
            for k in plan.kernels.keys() {
                let mut broken = plan.clone();
                change(&mut broken.kernels[k].entry);
                if broken != plan {
                    check(&broken).expect_err("it is not executed as compiled");
                }
            }
        };
        refused(&|e| match e {
            Entry::Host { extent, .. } => *extent += 1,
            Entry::Cuda { launches, .. } => launches[0].grid[0] += 1,
            Entry::Routine(routine) => routine.call.name.push('s'),
            Entry::Launches(selected) => drop(selected.launches.pop()),
            Entry::Interpreter => {}
        });
        refused(&|e| match e {
            Entry::Host { grain, .. } => *grain += 1,
            Entry::Cuda { launches, .. } => launches[0].block /= 2,
            Entry::Routine(routine) => routine.call.parameters = serde_json::Value::Bool(true),
            Entry::Launches(selected) => selected.launches.reverse(),
            Entry::Interpreter => {}
        });
        refused(&|e| match e {
            Entry::Host { symbol, .. } => symbol.push('0'),
            Entry::Cuda { launches, .. } => launches[0].grid_stride = !launches[0].grid_stride,
            Entry::Routine(routine) => routine.writes = Some(vec![]),
            Entry::Launches(selected) => selected.scratch_bytes += 256,
            Entry::Interpreter => {}
        });
        refused(&|e| match e {
            Entry::Cuda { scratch_bytes, .. } => *scratch_bytes += 256,
            e => *e = Entry::Interpreter,
        });
        refused(&|e| match e {
            Entry::Cuda { launches, .. } => launches[0].shared_bytes += 16,
            e => *e = Entry::Interpreter,
        });
        let generated: Vec<KernelId> = plan
            .kernels
            .keys()
            .filter(|&k| plan.kernels[k].kind() == KernelKind::Generated)
            .collect();
        // The code of another kernel.
        let (a, b) = (generated[0], generated[generated.len() - 1]);
        let mut swapped = plan.clone();
        swapped.kernels[a].entry = plan.kernels[b].entry.clone();
        check(&swapped).expect_err("another kernel's code");
        let mut swapped = plan.clone();
        (swapped.kernels[a].name, swapped.kernels[b].name) =
            (plan.kernels[b].name.clone(), plan.kernels[a].name.clone());
        check(&swapped).expect_err("another kernel's name");
    }
}

/// A flipped bit of any stored tensor is found, wherever it is stored.
#[test]
fn weights_are_those_that_were_compiled() {
    use frit::plan_dir::{Stored, write};
    use frit_runtime::plan_dir::verify_files;
    use frit_runtime::run::{RunOptions, run};
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.onnx");
    std::fs::copy(file("tests/models/mlp/model.onnx"), &model).expect("copied");
    let planned = plan_at(&model, 4, &["precision.compute=fp32"]);
    let data = file("tests/models/mlp/data.safetensors");
    let options =
        RunOptions { steps: 1, data: data.into(), threads: Some(1), ..RunOptions::default() };
    for (stored, holds) in
        [(Stored::Copy, "weights.safetensors"), (Stored::Reference, "model.onnx")]
    {
        let path = dir.path().join("plan");
        write(&path, &planned.compiled, stored).unwrap_or_else(|e| panic!("{e}"));
        let written =
            || Plan::from_json(&std::fs::read_to_string(path.join("plan.json")).expect("read"));
        let plan = written().expect("the plan");
        verify_files(&path, &plan).expect("as compiled");
        run(&path, &options).expect("it runs");
        let held = if stored == Stored::Copy { path.join(holds) } else { model.clone() };
        let good = std::fs::read(&held).expect("weights");
        let tensor = planned.compiled.weights.get(&plan.params[ParamId(0)].name).expect("a weight");
        let place = good.windows(tensor.bytes().len()).position(|w| w == tensor.bytes());
        let mut bad = good.clone();
        bad[place.expect("its bytes") + 5] ^= 0x40;
        std::fs::write(&held, &bad).expect("written");
        let name = &plan.params[ParamId(0)].name;
        let errors = [verify_files(&path, &plan).err(), run(&path, &options).err()];
        for error in errors {
            let error = error.expect("it was changed").to_string();
            assert!(error.contains(name) && error.contains("was changed"), "{error}");
        }
        std::fs::write(&held, &good).expect("written");
        verify_files(&path, &plan).expect("as compiled");
    }
}

/// The places of all texts that are pointers of launches.
fn pointers(value: &Value, path: &str, all: &mut Vec<String>) {
    match value {
        Value::String(text) if text.parse::<Pointer>().is_ok() => all.push(path.into()),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(i, item)| pointers(item, &format!("{path}/{i}"), all));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(key, item)| pointers(item, &format!("{path}/{key}"), all));
        }
        _ => {}
    }
}

/// No pointer of a launch leaves its operand, its result or the scratch memory, and none names what is not there.
#[test]
fn every_pointer_of_every_launch_stays_inside() {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    let mut n_pointers = 0;
    for model in ["gpt2", "resnet", "moe_dispatch"] {
        let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &cuda);
        let plan = planned.compiled.plan;
        for (k, kernel) in plan.kernels.iter_enumerated() {
            let Entry::Launches(selected) = &kernel.entry else { continue };
            let written = serde_json::to_value(&kernel.entry).expect("JSON");
            assert_eq!(
                serde_json::from_value::<Entry>(written.clone()).expect("read"),
                kernel.entry
            );
            let mut all = Vec::new();
            pointers(&written, "", &mut all);
            assert!(!all.is_empty() || selected.launches.is_empty(), "{written}");
            for at in all {
                let pointer: Pointer =
                    written.pointer(&at).unwrap().as_str().unwrap().parse().unwrap();
                let elsewhere = match pointer {
                    Pointer::Read(..) => Pointer::Read(99, 0),
                    Pointer::Write(..) => Pointer::Write(99, 0),
                    Pointer::Scratch(_) | Pointer::Fault => Pointer::Read(99, 0),
                };
                // A fault has one place.
                let further = pointer.offset(1 << 40);
                for moved in [further, elsewhere].into_iter().filter(|moved| *moved != pointer) {
                    let mut edited = written.clone();
                    *edited.pointer_mut(&at).unwrap() = moved.to_string().into();
                    let mut broken = plan.clone();
                    broken.kernels[k].entry = serde_json::from_value(edited).expect("an entry");
                    broken.kernels[k].bind();
                    let error = check(&broken).expect_err("it leaves its memory").to_string();
                    assert!(error.contains("are out of bounds"), "{error}");
                }
                n_pointers += 1;
            }
        }
    }
    assert!(n_pointers > 500, "{n_pointers}");
}

/// A candidate launches a generated kernel of the plan, with all its operands and its scratch memory, which is the
/// candidate's own and counts as memory of the plan.
#[test]
fn launches_of_generated_kernels_are_checked() {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=fp32"];
    let plan = plan("tests/models/mlp/model.onnx", 16384, &cuda).compiled.plan;
    let found = plan.kernels.iter_enumerated().find_map(|(id, kernel)| {
        let Entry::Launches(selected) = &kernel.entry else { return None };
        let [Launch::Choice(candidates)] = &selected.launches[..] else { return None };
        let bytes = candidates[1].scratch_bytes;
        (bytes > 0).then_some((id, bytes))
    });
    let (id, bytes) = found.expect("the rows of a bias gradient are split over blocks");
    assert_eq!(plan.kernels[id].entry.scratch_bytes(), bytes);
    assert!(plan.kernel_bytes() >= bytes);
    type Edit = fn(&mut Candidate, KernelId);
    fn launch(candidate: &mut Candidate) -> &mut GeneratedLaunch {
        match &mut candidate.launches[1] {
            Launch::Generated(launch) => launch,
            other => panic!("{other:?}"),
        }
    }
    let cases: [(&str, Edit); 8] = [
        ("out of bounds", |c, _| c.scratch_bytes -= 256),
        ("too much scratch memory", |c, _| c.scratch_bytes = usize::MAX),
        ("lacks", |c, _| launch(c).scratch = None),
        ("lacks", |c, _| launch(c).reads.clear()),
        ("lacks", |c, _| launch(c).writes.push(Pointer::Write(0, 0))),
        ("no generated kernel", |c, _| launch(c).kernel = KernelId(9999)),
        ("no generated kernel", |c, id| launch(c).kernel = id),
        ("not aligned", |c, _| {
            launch(c).scratch = Some(Pointer::Scratch(8));
            c.scratch_bytes += 256;
        }),
    ];
    for (expected, edit) in cases {
        let mut broken = plan.clone();
        let Entry::Launches(selected) = &mut broken.kernels[id].entry else { panic!("launches") };
        let Launch::Choice(candidates) = &mut selected.launches[0] else { panic!("a choice") };
        edit(&mut candidates[1], id);
        broken.kernels[id].bind();
        let error = check(&broken).expect_err("it is refused").to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// What a plan says of its inputs and of first values is part of what is proved.
#[test]
fn inputs_and_first_values_are_what_the_tasks_need() {
    let plan = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]).compiled.plan;
    verify_plan(&plan).expect("as compiled");
    type Edit = fn(&mut Plan);
    let cases: [(&str, Edit); 13] = [
        ("P316", |p| p.groups[GroupId(0)].states[0].init = 1.0),
        ("P316", |p| p.states.iter_mut().for_each(|s| s.init = 0.0)),
        ("P316", |p| p.states.iter_mut().for_each(|s| s.init += 1.0)),
        ("P106", |p| p.states.iter_mut().filter(|s| s.init > 0.0).for_each(|s| s.init *= 2.0)),
        ("P106", |p| p.groups[GroupId(0)].gather_dtypes.clear()),
        ("P001", |p| p.groups[GroupId(0)].param_groups.clear()),
        ("P001", |p| p.groups[GroupId(0)].param_groups[0].offset = 1),
        ("P001", |p| p.groups[GroupId(0)].param_groups[0].lr.push('!')),
        ("P001", |p| p.groups[GroupId(0)].param_groups[0].weight_decay = "another".into()),
        ("P602", |p| p.inputs[0].per_example = false),
        ("P602", |p| p.inputs[0].ty.shape.0[0] -= 1),
        ("P602", |p| p.inputs[1].ty.shape.0[0] = 0),
        ("P106", |p| p.inputs[0].ty.shape.0.reverse()),
    ];
    for (i, (code, change)) in cases.into_iter().enumerate() {
        let mut broken = plan.clone();
        change(&mut broken);
        let found = verify_plan(&broken).expect_err(&format!("case {i} is accepted"));
        assert!(found.iter().any(|d| d.code == code), "case {i}: {found:?}");
    }
}
