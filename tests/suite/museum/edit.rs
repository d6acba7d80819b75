//! Changes of a plan, in words: what a pass, a hook or a human with the same mistake would have made of it.
//!
//! - `drop TASK`: it writes zeros instead of its results; `skip TASK`: it does nothing;
//! - `sum TASK`: the collective adds up where it should average;
//! - `operand TASK I = J`: it reads operand J in place of operand I;
//! - `replace TASK: FROM => TO`: in the text of the body of its kernel, which the interpreter executes then;
//! - `code TASK: FROM => TO`: the same, but the code of the kernel stays, which is no longer that of its body;
//! - `hyper NAME = VALUE`: a hyper-parameter has another value;
//! - `init PARAMETER = JSON`: a parameter begins with other values;
//! - `field POINTER = JSON`: a field of the plan is another one;
//! - `keep sums`: what micro-steps add up is not cleared after the step;
//! - `unwait STREAM`: tasks of this stream wait for no other;
//! - `draw masks`: a kernel draws the mask of a dropout.
//!
//! TASK is the name of a task, or `op OPERATION` for the first whose kernel has this operation. Of a graph, where NODE is `OPERATION N`,
//! the N-th of its nodes with this operation, counted from 0:
//!
//! - `drop NODE`: its first operand takes the place of its result;
//! - `operand NODE I = J`: it reads operand J in place of operand I;
//! - `replace NODE: FROM => TO`: in the text of its attributes.

use frit_ir::ops::{Constant, RandomMask, ReduceKind};
use frit_ir::plan::{Action, BufferId, Entry, Kernel, KernelId, Plan, Stream, Task, seal};
use frit_ir::{DType, Graph, NodeId, Op, Origin, Region, Shape, Tensor, text};

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
        "replace" | "code" => {
            let (name, change) = rest.split_once(": ").expect("`TASK: FROM => TO`");
            let (from, to) = change.split_once(" => ").expect("`FROM => TO`");
            let Action::Kernel { kernel, .. } = task(plan, name).action else {
                panic!("{name} has no kernel")
            };
            let kernel = &mut plan.kernels[kernel];
            let body = kernel.body.to_string();
            assert!(body.contains(from), "`{from}` is not in {body}");
            kernel.body = text::parse(&body.replace(from, to)).expect("a graph");
            match word {
                "replace" => {
                    let (name, body) = (kernel.name.clone(), kernel.body.clone());
                    *kernel = Kernel::new(name, body, Entry::Interpreter);
                }
                _ => kernel.bind(),
            }
        }
        "hyper" | "init" | "field" => {
            let (name, new) = rest.split_once(" = ").expect("`NAME = VALUE`");
            let new = serde_json::from_str(new).expect("JSON");
            let mut json = serde_json::to_value(&*plan).expect("JSON");
            let at = |list: &str| {
                let all = json[list].as_array().expect("a list");
                all.iter().position(|item| item["name"] == name).expect("an item of this name")
            };
            let pointer = match word {
                "hyper" => format!("/hyper/{}/value", at("hyper")),
                "init" => format!("/params/{}/init", at("params")),
                _ => name.into(),
            };
            let field = json.pointer_mut(&pointer).expect("a field");
            assert_ne!(*field, new, "it is that already");
            *field = new;
            *plan = Plan::from_json(&seal(&json.to_string())).expect("a plan");
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

/// Changes a graph.
pub(super) fn apply_to_graph(graph: &mut Graph, edit: &str) {
    let (word, rest) = edit.split_once(' ').expect("a word and what it changes");
    let (words, change) = match word {
        "drop" => (rest, ""),
        "operand" => rest
            .rsplitn(4, ' ')
            .last()
            .map(|node| (node, &rest[node.len() + 1..]))
            .expect("`NODE I = J`"),
        "replace" => rest.split_once(": ").expect("`NODE: FROM => TO`"),
        _ => panic!("`{edit}` is no edit of a graph"),
    };
    let (op, at) = words.rsplit_once(' ').expect("`OPERATION N`");
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let all: Vec<NodeId> =
        graph.nodes().filter(|(_, n)| n.op.name() == op).map(|(id, _)| id).collect();
    let id = *all.get(number(at)).unwrap_or_else(|| panic!("{} nodes are {op}", all.len()));
    let node = graph.node(id).clone();
    match word {
        "drop" => {
            assert_eq!(
                graph.ty(node.outputs[0]),
                graph.ty(node.inputs[0]),
                "{op} changes the type"
            );
            graph.replace_uses(node.outputs[0], node.inputs[0]);
            graph.remove_dead();
        }
        "operand" => {
            let (which, other) = change.split_once(" = ").expect("`I = J`");
            let mut inputs = node.inputs;
            inputs[number(which)] = inputs[number(other)];
            graph.set_inputs(id, inputs).expect("it fits");
            graph.remove_dead();
        }
        _ => {
            let (from, to) = change.split_once(" => ").expect("`FROM => TO`");
            let (name, attributes) = node.op.to_parts();
            let text = serde_json::to_string(&attributes).expect("JSON");
            assert!(text.contains(from), "`{from}` is not in {text}");
            let attributes = serde_json::from_str(&text.replace(from, to)).expect("JSON");
            graph.node_mut(id).op = Op::from_parts(name, attributes).expect("an operation");
        }
    }
    frit_ir::verify::verify(graph).expect("a graph");
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
