//! `verify_plan` against plans that were changed at random. A changed plan that it accepts must give bit-identical
//! results in every order of tasks that its events allow.
//!
//! It also refuses plans that give correct results on this machine; they are counted by kind. Their classes: a
//! collective or a kernel that names another group or buffer with the same ranks, sizes and values; a task on another
//! stream, in another phase that runs as often, or without a wait, whose operands happen to be ready in the orders that
//! were tried; a buffer on bytes that happen to be dead in these orders. Such plans are wrong nevertheless: a device
//! may choose other orders.
//!
//! `FRIT_MUTANTS` sets their number.

use crate::machine::{Fault, Machine, Random};
use crate::support::{Planned, plan_at};
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, BufferId, GroupId, KernelId, PhaseId, Place, Plan, Stream, TaskId};
use frit_passes::verify_plan::verify_plan;
use std::collections::BTreeMap;

/// Mutants, unless `FRIT_MUTANTS` says otherwise.
const MUTANTS: usize = 1080;
const INTERLEAVINGS: u64 = 20;
/// Changes of a kind that are drawn until one changes the plan.
pub(crate) const TRIES: usize = 100;
pub(crate) const STEPS: usize = 2;

const MODEL: &str = r#"{ "frit_model": 1, "name": "blocks",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "up", "shape": [3, 4], "init": { "constant": 0.5 } },
              { "name": "down", "shape": [4, 2], "init": { "constant": 0.5 } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "up"], "outputs": ["a"] },
             { "repeat": 3, "scope": "h.{i}", "carry": ["a"],
               "params": [ { "name": "w", "shape": [4, 4], "init": { "constant": 0.5 } },
                           { "name": "b", "shape": [4], "init": { "constant": 0.0 } } ],
               "nodes": [ { "op": "matmul", "inputs": ["a", "w"], "outputs": ["m"] },
                          { "op": "add", "inputs": ["m", "b"], "outputs": ["s"] },
                          { "op": "tanh", "inputs": ["s"], "outputs": ["a"] } ] },
             { "op": "matmul", "inputs": ["a", "down"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

/// Statistics over all ranks, and parameters of the shape of statistics.
const NORMALIZED: &str = r#"{ "frit_model": 1, "name": "normalized",
  "dims": { "batch": null },
  "inputs": [ { "name": "x", "dtype": "f32", "shape": ["batch", 3] } ],
  "params": [ { "name": "w", "shape": [3, 4], "init": { "constant": 0.5 } },
              { "name": "scale", "shape": [4], "init": { "constant": 1.5 } },
              { "name": "bias", "shape": [4], "init": { "constant": 0.5 } },
              { "name": "offset", "shape": [4], "init": { "constant": 0.0 } } ],
  "nodes": [ { "op": "matmul", "inputs": ["x", "w"], "outputs": ["a"] },
             { "op": "batch_norm", "attrs": { "eps": 1e-5 }, "inputs": ["a", "scale", "bias"],
               "outputs": ["n", "mean", "var"] },
             { "op": "tanh", "inputs": ["n"], "outputs": ["t"] },
             { "op": "add", "inputs": ["t", "offset"], "outputs": ["y"] } ],
  "outputs": ["y"] }"#;

/// Models and settings: every strategy, with and without accumulation, synchronization, offload and what is frozen.
pub(crate) fn models() -> Vec<(&'static str, Vec<&'static str>)> {
    let settings: [&[&str]; 13] = [
        &["sharding.ranks=3", "precision.compute=fp32"],
        &["sharding.ranks=3", "precision.compute=bf16", "run.accumulation=2"],
        &["sharding.ranks=3", "precision.compute=fp16", "sharding.strategy=no_shard"],
        &["sharding.ranks=3", "sharding.strategy=shard_optimizer", "run.accumulation=2"],
        &["sharding.ranks=4", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"],
        &[
            "sharding.ranks=3",
            "sharding.strategy=shard_grad_op",
            "sharding.no_sync=true",
            "run.accumulation=2",
            "optimizer.kind=momentum",
        ],
        &["sharding.ranks=3", "precision.compute=fp32", "optimizer.kind=adafactor"],
        &["sharding.ranks=3", "precision.compute=fp32", "optimizer.kind=muon"],
        &["sharding.ranks=4", "precision.compute=bf16", "sharding.reshard_after_forward=2"],
        &["sharding.ranks=3", "memory.offload=parameters", "optimizer.ema=0.9"],
        &["sharding.ranks=1", "memory.offload=parameters", "run.accumulation=2"],
        &["sharding.ranks=3", "precision.compute=bf16", "params.frozen=[\"h.1.w\", \"up\"]"],
        &["sharding.ranks=3", "params.frozen=[\"h.1.w\", \"up\"]", "memory.offload=parameters"],
    ];
    let sync = ["sharding.ranks=3", "precision.compute=fp32", "model.batch_norm=sync"];
    let sync: &[&str] = &[&sync[..], &["run.accumulation=2"]].concat();
    let all = settings.into_iter().map(|more| (MODEL, more)).chain([(NORMALIZED, sync)]);
    let with_loss = |more: &[&'static str]| [&["loss.kind=mse", "loss.logits=y"], more].concat();
    all.map(|(model, more)| (model, with_loss(more))).collect()
}

fn plans() -> Vec<Planned> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    let plan = |(model, settings): (&str, Vec<&str>)| {
        std::fs::write(&path, model).expect("written");
        plan_at(&path, 2, &settings)
    };
    models().into_iter().map(plan).collect()
}

/// A kind of change; false if there is nothing to change.
pub(crate) type Mutation = fn(&mut Plan, &mut Random) -> bool;

pub(crate) const KINDS: [(&str, Mutation); 14] = [
    ("a wait dropped", drop_wait),
    ("a wait for an earlier task", earlier_wait),
    ("neighbors swapped", swap_neighbors),
    ("a task moved", move_task),
    ("a task left out", leave_out),
    ("a task on another stream", other_stream),
    ("a buffer moved", move_buffer),
    ("a buffer on another", stack_buffers),
    ("another operand", other_operand),
    ("another result", other_result),
    ("a place shifted", shift_place),
    ("another kernel", other_kernel),
    ("a collective changed", change_collective),
    ("a phase that ends elsewhere", move_boundary),
];

fn pick_task(plan: &Plan, random: &mut Random, which: impl Fn(TaskId) -> bool) -> Option<TaskId> {
    let all: Vec<TaskId> = plan.tasks.keys().filter(|i| which(*i)).collect();
    (!all.is_empty()).then(|| all[random.below(all.len())])
}

fn drop_wait(plan: &mut Plan, random: &mut Random) -> bool {
    let Some(i) = pick_task(plan, random, |i| !plan.tasks[i].waits.is_empty()) else {
        return false;
    };
    let k = random.below(plan.tasks[i].waits.len());
    plan.tasks[i].waits.remove(k);
    true
}

fn earlier_wait(plan: &mut Plan, random: &mut Random) -> bool {
    let Some(i) = pick_task(plan, random, |i| !plan.tasks[i].waits.is_empty()) else {
        return false;
    };
    let begin = plan.phases.iter().rfind(|p| p.begin <= i).expect("a phase").begin;
    let k = random.below(plan.tasks[i].waits.len());
    let wait = plan.tasks[i].waits[k];
    if wait == begin {
        return false;
    }
    plan.tasks[i].waits[k] = TaskId(begin.0 + random.below(wait.0 - begin.0));
    true
}

/// Moves the task at `from` to `to` within its phase; waits follow the tasks they name.
fn relocate(plan: &mut Plan, from: TaskId, to: TaskId) -> bool {
    let task = plan.tasks.remove(from);
    plan.tasks.insert(to, task);
    let moved = |w: TaskId| match w {
        w if w == from => to,
        w if from < w && w <= to => TaskId(w.0 - 1),
        w if to <= w && w < from => w.next(),
        w => w,
    };
    for task in &mut plan.tasks {
        task.waits.iter_mut().for_each(|w| *w = moved(*w));
    }
    true
}

fn phase_of(plan: &Plan, task: TaskId) -> (TaskId, TaskId) {
    let phase = plan.phases.iter().find(|p| p.range().contains(&task)).expect("a phase");
    (phase.begin, phase.end)
}

fn swap_neighbors(plan: &mut Plan, random: &mut Random) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    let (_, end) = phase_of(plan, i);
    i.next() < end && relocate(plan, i, i.next())
}

fn move_task(plan: &mut Plan, random: &mut Random) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    let (begin, end) = phase_of(plan, i);
    let to = TaskId(begin.0 + random.below(end.0 - begin.0));
    to != i && relocate(plan, i, to)
}

fn leave_out(plan: &mut Plan, random: &mut Random) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    plan.tasks[i].action = Action::Zero { places: vec![] };
    plan.tasks[i].stream = Stream::Compute;
    true
}

fn other_stream(plan: &mut Plan, random: &mut Random) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    let stream = Stream::ALL[random.below(Stream::ALL.len())];
    let changed = plan.tasks[i].stream != stream;
    plan.tasks[i].stream = stream;
    changed
}

fn move_buffer(plan: &mut Plan, random: &mut Random) -> bool {
    let b = BufferId(random.below(plan.buffers.len()));
    let arena = plan.arena_bytes(plan.buffers[b].arena);
    let slots = arena.saturating_sub(plan.buffers[b].bytes) / 256 + 1;
    let offset = random.below(slots) * 256;
    let changed = plan.buffers[b].offset != offset;
    plan.buffers[b].offset = offset;
    changed
}

fn stack_buffers(plan: &mut Plan, random: &mut Random) -> bool {
    let [a, b] = [0; 2].map(|_| BufferId(random.below(plan.buffers.len())));
    let (arena, offset) = (plan.buffers[b].arena, plan.buffers[b].offset);
    let changed = plan.buffers[a].arena == arena && plan.buffers[a].offset != offset;
    plan.buffers[a].offset = offset;
    changed
}

/// A place of the same type that some task accesses, or that begins where one does.
fn similar(plan: &Plan, random: &mut Random, place: &Place) -> Option<Place> {
    let all: Vec<&Place> = plan
        .tasks
        .iter()
        .flat_map(|t| t.action.reads().into_iter().chain(t.action.writes()))
        .filter(|p| p.ty == place.ty && *p != place)
        .collect();
    (!all.is_empty()).then(|| all[random.below(all.len())].clone())
}

fn other_operand(plan: &mut Plan, random: &mut Random) -> bool {
    replace_place(plan, random, Action::reads_mut)
}

fn other_result(plan: &mut Plan, random: &mut Random) -> bool {
    replace_place(plan, random, Action::writes_mut)
}

fn replace_place(
    plan: &mut Plan,
    random: &mut Random,
    places: fn(&mut Action) -> Vec<&mut Place>,
) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    let n = places(&mut plan.tasks[i].action).len();
    if n == 0 {
        return false;
    }
    let k = random.below(n);
    let place = places(&mut plan.tasks[i].action)[k].clone();
    let Some(other) = similar(plan, random, &place) else { return false };
    *places(&mut plan.tasks[i].action)[k] = other;
    true
}

fn shift_place(plan: &mut Plan, random: &mut Random) -> bool {
    let i = TaskId(random.below(plan.tasks.len()));
    let places = if random.below(2) == 0 { Action::reads_mut } else { Action::writes_mut };
    let n = places(&mut plan.tasks[i].action).len();
    if n == 0 {
        return false;
    }
    let k = random.below(n);
    let place = places(&mut plan.tasks[i].action)[k].clone();
    let step = place.ty.dtype.size() * (1 + random.below(16));
    let up = random.below(2) == 0;
    let offset = if up { Some(place.offset + step) } else { place.offset.checked_sub(step) };
    let Some(offset) = offset else { return false };
    places(&mut plan.tasks[i].action)[k].offset = offset;
    true
}

fn other_kernel(plan: &mut Plan, random: &mut Random) -> bool {
    let is_kernel = |i: TaskId| matches!(plan.tasks[i].action, Action::Kernel { .. });
    let Some(i) = pick_task(plan, random, is_kernel) else { return false };
    let other = KernelId(random.below(plan.kernels.len()));
    let Action::Kernel { kernel, .. } = &mut plan.tasks[i].action else { return false };
    let changed = *kernel != other;
    *kernel = other;
    changed
}

fn change_collective(plan: &mut Plan, random: &mut Random) -> bool {
    let n_groups = plan.groups.len();
    let is_collective = |i: TaskId| plan.tasks[i].action.is_collective();
    let Some(i) = pick_task(plan, random, is_collective) else { return false };
    let (kind, other) = (random.below(3), GroupId(random.below(n_groups)));
    let action = &mut plan.tasks[i].action;
    let before = action.clone();
    match (&mut *action, kind) {
        (Action::ReduceScatter { reduce, .. } | Action::AllReduce { reduce, .. }, 0) => {
            let mean = *reduce == ReduceKind::Mean;
            *reduce = if mean { ReduceKind::Sum } else { ReduceKind::Mean };
        }
        (Action::AllGather { ranks: Some(n), .. }, 0) => *n = 3 - *n,
        (Action::AllReduce { group, .. }, 1) => {
            *group = if group.is_some() { None } else { Some(other) };
        }
        (Action::AllReduce { group: Some(group), .. }, _)
        | (Action::AllGather { group, .. } | Action::ReduceScatter { group, .. }, _) => {
            *group = other;
        }
        (Action::AllReduce { send, recv, .. }, _) => {
            *action = Action::Copy { from: send.clone(), to: recv.clone() };
        }
        _ => return false,
    }
    *action != before
}

fn move_boundary(plan: &mut Plan, random: &mut Random) -> bool {
    let k = random.below(plan.phases.len() - 1);
    let (k, after) = (PhaseId(k), PhaseId(k + 1));
    let border = plan.phases[k].end.0;
    let border = if random.below(2) == 0 { border + 1 } else { border.saturating_sub(1) };
    let border = TaskId(border);
    if border < plan.phases[k].begin || border > plan.phases[after].end {
        return false;
    }
    plan.phases[k].end = border;
    plan.phases[after].begin = border;
    true
}

/// What the plan does in these orders of tasks: the outcome of the unchanged one, or how it differs.
fn differs(
    mutant: &Plan,
    original: &Plan,
    constants: &[(String, frit_ir::Tensor)],
    expected: &[u8],
    seeds: std::ops::Range<u64>,
) -> Option<Result<(), Fault>> {
    for seed in seeds {
        let mut machine = Machine::new(mutant, constants);
        match machine.run(STEPS, seed) {
            Err(fault) => return Some(Err(fault)),
            Ok(()) if machine.outcome(original) != expected => return Some(Ok(())),
            Ok(()) => {}
        }
    }
    None
}

#[test]
fn no_changed_plan_is_accepted_that_does_something_else() {
    let wanted = std::env::var("FRIT_MUTANTS").ok().and_then(|n| n.parse().ok()).unwrap_or(MUTANTS);
    let plans = plans();
    let mut expected = Vec::new();
    for planned in &plans {
        let (plan, constants) = (&planned.compiled.plan, &planned.compiled.constants);
        let mut machine = Machine::new(plan, constants);
        machine.run(STEPS, 0).expect("the plan runs");
        let outcome = machine.outcome(plan);
        // Whatever the order, and from step to step something changes.
        assert_eq!(differs(plan, plan, constants, &outcome, 1..INTERLEAVINGS), None);
        assert_ne!(Machine::new(plan, constants).outcome(plan), outcome);
        expected.push(outcome);
    }
    // By kind: made, accepted, and refused though nothing differs.
    let mut counts: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    let mut random = Random::new(7);
    let (mut made, mut turn) = (0, 0);
    while made < wanted {
        let (p, k) = (turn % plans.len(), turn / plans.len() % KINDS.len());
        turn += 1;
        let (plan, constants) = (&plans[p].compiled.plan, &plans[p].compiled.constants);
        let (name, mutate) = KINDS[k];
        // Not every plan has what every kind changes: one rank has no collectives.
        let changed = |_| {
            let mut mutant = plan.clone();
            (mutate(&mut mutant, &mut random) && mutant != *plan).then_some(mutant)
        };
        let Some(mutant) = (0..TRIES).find_map(changed) else { continue };
        made += 1;
        let count = counts.entry(name).or_default();
        count[0] += 1;
        match verify_plan(&mutant) {
            Ok(()) => {
                count[1] += 1;
                let found = differs(&mutant, plan, constants, &expected[p], 0..INTERLEAVINGS);
                assert_eq!(found, None, "mutant {made} of plan {p} was accepted: {name}");
            }
            // What the loader refuses cannot be run at all.
            Err(found) if found[0].code == "P001" => {}
            Err(_) if made.is_multiple_of(5) => {
                let found = differs(&mutant, plan, constants, &expected[p], 0..3);
                count[2] += usize::from(found.is_none());
            }
            Err(_) => {}
        }
    }
    eprintln!("made, accepted, and of every fifth the refused that do no harm:");
    counts.iter().for_each(|(name, count)| eprintln!("  {name}: {count:?}"));
    assert!(made < 12 * plans.len() || counts.len() >= 12);
}
