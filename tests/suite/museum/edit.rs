//! Changes of a plan, in words: what a pass, a hook or a human with the same mistake would have made of it.
//!
//! - `drop TASK`: it writes zeros instead of its results; `skip TASK`: it does nothing;
//! - `sum TASK`: the collective adds up where it should average;
//! - `operand TASK I = J`: it reads operand J in place of operand I;
//! - `replace TASK: FROM => TO`: in the text of the body of its kernel;
//! - `keep sums`: what micro-steps add up is not cleared after the step;
//! - `unwait STREAM`: tasks of this stream wait for no other;
//! - `draw masks`: a kernel draws the mask of a dropout.
//!
//! TASK is the name of a task, or `op OPERATION` for the first whose kernel has this operation.

use frit_ir::ops::{Constant, RandomMask, ReduceKind};
use frit_ir::plan::{Action, BufferId, Kernel, KernelId, Plan, Stream, Task};
use frit_ir::{DType, Op, Origin, Region, Shape, Tensor, text};

/// Changes the plan.
pub(super) fn apply(plan: &mut Plan, edit: &str) {
    let (word, rest) = edit.split_once(' ').expect("a word and what it changes");
    match word {
        "drop" => {
            let task = task(plan, rest);
            let places = task.action.writes().into_iter().cloned().collect();
            task.action = Action::Zero { places };
        }
        "skip" => task(plan, rest).action = Action::Zero { places: vec![] },
        "sum" => match &mut task(plan, rest).action {
            Action::ReduceScatter { reduce, .. } | Action::AllReduce { reduce, .. } => {
                *reduce = ReduceKind::Sum
            }
            other => panic!("{other:?} does not reduce"),
        },
        "operand" => {
            let (name, other) = rest.split_once(" = ").expect("`TASK I = J`");
            let (name, which) = name.rsplit_once(' ').expect("`TASK I`");
            let number = |text: &str| text.parse::<usize>().expect("the number of an operand");
            let mut reads = task(plan, name).action.reads_mut();
            *reads[number(which)] = reads[number(other)].clone();
        }
        "replace" => {
            let (name, change) = rest.split_once(": ").expect("`TASK: FROM => TO`");
            let (from, to) = change.split_once(" => ").expect("`FROM => TO`");
            let Action::Kernel { kernel, .. } = task(plan, name).action else {
                panic!("{name} has no kernel")
            };
            let body = plan.kernels[kernel].body.to_string();
            assert!(body.contains(from), "`{from}` is not in {body}");
            plan.kernels[kernel].body = text::parse(&body.replace(from, to)).expect("a graph");
            plan.kernels[kernel].bind();
        }
        "keep" => {
            let sums: Vec<BufferId> =
                plan.groups.iter().flat_map(|g| &g.states).map(|s| s.buffer).collect();
            let clears = plan.tasks.iter_mut().filter_map(|t| match &mut t.action {
                Action::Zero { places } if places.iter().any(|p| sums.contains(&p.buffer)) => {
                    Some(places)
                }
                _ => None,
            });
            let cleared: Vec<_> =
                clears.map(|places| places.retain(|p| !sums.contains(&p.buffer))).collect();
            assert!(!cleared.is_empty(), "nothing is cleared");
        }
        "unwait" => {
            let is = |s: Stream| format!("{s:?}").to_lowercase() == rest;
            let of: Vec<&mut Task> = plan.tasks.iter_mut().filter(|t| is(t.stream)).collect();
            assert!(of.iter().any(|t| !t.waits.is_empty()), "no task of {rest} waits");
            of.into_iter().for_each(|t| t.waits.clear());
        }
        "draw" => {
            let kernel = plan.kernels.first_mut().expect("kernels");
            let (origin, region) = (Origin::none(), Region::Forward);
            let seed = Constant { value: Tensor::ints(DType::I64, [5], vec![0; 5]) };
            let seed =
                kernel.body.add1(Op::Constant(seed), &[], origin.clone(), region).expect("it fits");
            let mask = RandomMask { shape: Shape::from([2]), keep: 0.5, id: 0 };
            kernel.body.add1(Op::RandomMask(mask), &[seed], origin, region).expect("it fits");
            kernel.bind();
        }
        _ => panic!("`{edit}` is no edit"),
    }
}

/// The task of this name.
fn task<'a>(plan: &'a mut Plan, name: &str) -> &'a mut Task {
    let has = |kernel: KernelId, op: &str| {
        plan.kernels[kernel].body.nodes().any(|(_, n)| n.op.name() == op)
    };
    let is = |t: &Task| match (name.strip_prefix("op "), &t.action) {
        (Some(op), Action::Kernel { kernel, .. }) => has(*kernel, op),
        (Some(_), _) => false,
        (None, _) => t.name == name,
    };
    let at = plan.tasks.iter_enumerated().find(|(_, t)| is(t)).map(|(at, _)| at);
    let names = || plan.tasks.iter().map(|t| t.name.as_str()).collect::<Vec<_>>().join(", ");
    let at = at.unwrap_or_else(|| panic!("no task `{name}` among {}", names()));
    &mut plan.tasks[at]
}

/// The dtypes of the first operand of all operations, or of what all collectives of this name send, or of `states`:
/// optimizer state and what micro-steps add up.
pub(super) fn dtypes(plan: &Plan, of: &str) -> Vec<String> {
    let sent = |action: &Action| match (of, action) {
        ("all_gather", Action::AllGather { send, .. })
        | ("reduce_scatter", Action::ReduceScatter { send, .. })
        | ("all_reduce", Action::AllReduce { send, .. }) => Some(send.ty.dtype.to_string()),
        _ => None,
    };
    let collectives = plan.tasks.iter().filter_map(|t| sent(&t.action));
    let states: Vec<BufferId> =
        plan.groups.iter().flat_map(|g| &g.states).map(|s| s.buffer).collect();
    let kept = plan.tasks.iter().filter(|_| of == "states").flat_map(|t| t.action.writes());
    let kept = kept.filter(|p| states.contains(&p.buffer)).map(|p| p.ty.dtype.to_string());
    let operations = plan.kernels.iter().flat_map(|k: &Kernel| {
        let of_name = k.body.nodes().filter(|(_, n)| n.op.name() == of && !n.inputs.is_empty());
        of_name.map(|(_, n)| k.body.ty(n.inputs[0]).dtype.to_string()).collect::<Vec<_>>()
    });
    collectives.chain(kept).chain(operations).collect()
}
