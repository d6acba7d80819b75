//! Every invariant of `verify_plan`: a plan that violates it, and the code that must be reported.

use crate::support::plan;
use frit_ir::ops::{AdafactorPart, BinaryFn, Cast, Clip, ReduceKind, Reshape, StateName, UnaryFn};
use frit_ir::plan::{
    Action, Arena, Buffer, BufferClass, BufferId, Candidate, Entry, Epilogue, Gemm,
    GeneratedLaunch, GroupId, IndexRange, Kernel, KernelId, Launch, Launches, ParamHome, PhaseName,
    Place, Plan, Pointer, Stream, TaskId, TiVec,
};
use frit_ir::{DType, Op, Region, Shape};
use frit_passes::verify_plan::verify_plan;

type Break = fn(&mut Plan);

/// The codes in the order of findings.
fn codes(plan: &Plan, change: Break) -> Vec<String> {
    let mut broken = plan.clone();
    change(&mut broken);
    let found = verify_plan(&broken).expect_err("the plan is broken");
    found.into_iter().map(|d| d.code).collect()
}

fn gpt2(settings: &[&str]) -> Plan {
    let settings = [&["sharding.ranks=2"], settings].concat();
    plan("tests/models/gpt2/model.onnx", 2, &settings).compiled.plan
}

/// The first task with such an action.
fn task(plan: &mut Plan, which: impl Fn(&Action) -> bool) -> &mut frit_ir::plan::Task {
    plan.tasks.iter_mut().find(|t| which(&t.action)).expect("there is one")
}

/// The first task that runs this operation.
fn kernel<'a>(plan: &'a mut Plan, op: &str) -> &'a mut frit_ir::plan::Task {
    let is = |k: &Kernel| k.body.nodes().any(|(_, n)| n.op.name() == op);
    let kernels: TiVec<KernelId, bool> = plan.kernels.iter().map(is).collect();
    task(plan, |a| matches!(a, Action::Kernel { kernel, .. } if kernels[*kernel]))
}

/// Writes zeros instead.
fn drop_task(task: &mut frit_ir::plan::Task) {
    let places = task.action.writes().into_iter().cloned().collect();
    task.action = Action::Zero { places };
}

fn is_reduction(action: &Action) -> bool {
    matches!(action, Action::ReduceScatter { .. })
}

#[test]
fn bytes() {
    let cases: [(&str, Break); 5] = [
        ("P101", |p| p.tasks[TaskId::FIRST].action = Action::Zero { places: vec![] }),
        ("P102", overlap_two_activations),
        ("P103", |p| clear_waits(p, Stream::Gather)),
        ("P104", |p| clear_waits(p, Stream::Compute)),
        ("P105", |p| {
            let narrow = |a: &Action| matches!(a, Action::AllGather { send, .. } if send.ty.dtype == DType::BF16);
            let Action::AllGather { send, recv, .. } = &mut task(p, narrow).action else { return };
            (send.ty.dtype, recv.ty.dtype) = (DType::F16, DType::F16);
        }),
    ];
    let (fp32, bf16) = (gpt2(&["precision.compute=fp32"]), gpt2(&["precision.compute=bf16"]));
    for (code, change) in cases {
        let plan = if code == "P105" { &bf16 } else { &fp32 };
        assert_eq!(codes(plan, change)[0], code);
    }
}

/// The buffer of a result moves onto that of an operand of the same size: allowed for elementwise kernels only.
#[test]
fn results_on_operands() {
    let plan = gpt2(&["precision.compute=fp32"]);
    let mut only_that = 0;
    for task in plan.tasks.keys() {
        let Action::Kernel { kernel, reads, writes } = &plan.tasks[task].action else { continue };
        let apart = |r: &&Place| r.buffer != writes[0].buffer && r.ty == writes[0].ty;
        let Some(read) = reads.iter().find(apart) else { continue };
        let mut broken = plan.clone();
        let Buffer { arena, offset, .. } = plan.buffers[read.buffer];
        let moved = &mut broken.buffers[writes[0].buffer];
        (moved.arena, moved.offset) = (arena, offset);
        match verify_plan(&broken) {
            Ok(()) => {
                let body = &plan.kernels[*kernel].body;
                let elementwise = body.nodes().all(|(_, n)| n.op.is_leaf() || n.op.is_pointwise());
                let written = &body.def(body.outputs[0].value).op;
                let gradient = matches!(written, Op::CrossEntropyGrad(_));
                assert!(elementwise || gradient, "task {task} may write over its operand");
            }
            Err(found) => only_that += usize::from(found.iter().all(|d| d.code == "P107")),
        }
    }
    assert!(only_that > 3, "{only_that} plans are broken by nothing else");
    let cases: [Break; 2] = [
        // Over another result, and over another operand than its own.
        |p| {
            let Action::Kernel { writes, .. } = &mut kernel(p, "optimizer_step").action else {
                return;
            };
            writes[1] = writes[0].clone();
        },
        |p| {
            let Action::Kernel { writes, .. } = &mut kernel(p, "optimizer_step").action else {
                return;
            };
            writes[0].offset += 4;
            writes[0].ty.shape.0[0] -= 1;
        },
    ];
    assert!(codes(&plan, cases[0]).iter().any(|c| c == "P107"));
    codes(&plan, cases[1]);
}

/// Puts an activation on the bytes of another one of the same stream that is read again later.
fn overlap_two_activations(plan: &mut Plan) {
    let span = |b: BufferId| {
        let touches = |t: &frit_ir::plan::Task| {
            t.action.reads().into_iter().chain(t.action.writes()).any(|p| p.buffer == b)
        };
        let on_compute = |t: &frit_ir::plan::Task| t.stream == Stream::Compute;
        let tasks: Vec<TaskId> = plan.tasks.keys().filter(|&i| touches(&plan.tasks[i])).collect();
        let inside = tasks.iter().all(|&i| on_compute(&plan.tasks[i]));
        let buffer = &plan.buffers[b];
        let activation =
            buffer.class == BufferClass::Activation && buffer.arena == Arena::Workspace;
        (inside && activation && tasks.len() > 1).then(|| (tasks[0], tasks[tasks.len() - 1]))
    };
    let spans: Vec<_> = plan.buffers.keys().map(|b| (b, span(b))).collect();
    let nested = spans.iter().find_map(|(a, outer)| {
        let (first, last) = (*outer)?;
        let inner = |(_, s): &&(BufferId, Option<(TaskId, TaskId)>)| {
            s.is_some_and(|(begin, end)| first < begin && end < last)
        };
        spans.iter().find(inner).map(|(b, _)| (*a, *b))
    });
    let (outer, inner) = nested.expect("two activations, one within the life of the other");
    plan.buffers[inner].offset = plan.buffers[outer].offset;
}

fn clear_waits(plan: &mut Plan, stream: Stream) {
    plan.tasks.iter_mut().filter(|t| t.stream == stream).for_each(|t| t.waits.clear());
}

#[test]
fn collectives() {
    let cases: [(&str, Break); 5] = [
        ("P202", drop_reads_of_last_gather),
        ("P203", |p| drop_task(task(p, is_reduction))),
        ("P203", |p| {
            let Action::ReduceScatter { reduce, .. } = &mut task(p, is_reduction).action else {
                return;
            };
            *reduce = ReduceKind::Sum;
        }),
        ("P204", |p| {
            p.groups[GroupId(0)].trainable = false;
            p.groups[GroupId(0)].param_groups.clear();
        }),
        ("P205", |p| task(p, is_reduction).stream = Stream::Compute),
    ];
    let plan = gpt2(&["precision.compute=fp32"]);
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn a_collective_of_one_rank() {
    let plan = plan("tests/models/gpt2/model.onnx", 2, &["sharding.ranks=1"]).compiled.plan;
    let change: Break = |p| {
        let (send, reduce) = (p.metrics[0].place.clone(), ReduceKind::Sum);
        let last = p.tasks.last_mut().expect("tasks");
        last.stream = Stream::Reduce;
        last.action = Action::AllReduce { group: None, reduce, recv: send.clone(), send };
    };
    let codes = codes(&plan, change);
    assert!(codes.iter().any(|c| c == "P201"), "found {codes:?}");
}

fn drop_reads_of_last_gather(plan: &mut Plan) {
    let gathered = plan.tasks.iter().rev().find_map(|t| match &t.action {
        Action::AllGather { recv, .. } => Some(recv.buffer),
        _ => None,
    });
    let buffer = gathered.expect("a gather");
    let reads = |t: &&mut frit_ir::plan::Task| t.action.reads().iter().any(|p| p.buffer == buffer);
    plan.tasks.iter_mut().filter(reads).for_each(drop_task);
}

#[test]
fn the_update() {
    let cases: [(&str, Break); 8] = [
        ("P301", |p| {
            let group = p.groups.iter_mut().find(|g| g.segments.len() > 1).expect("a group");
            group.segments.pop();
        }),
        ("P302", |p| drop_task(kernel(p, "optimizer_step"))),
        ("P303", |p| p.loss_capacity *= 2),
        ("P303", |p| drop_task(kernel(p, "loss_scale"))),
        ("P304", |p| drop_task(kernel(p, "unscale"))),
        ("P305", |p| drop_task(kernel(p, "grad_stats"))),
        ("P306", |p| drop_task(task(p, |a| matches!(a, Action::AllReduce { group: None, .. })))),
        ("P307", |p| {
            let Action::Kernel { reads, .. } = &mut kernel(p, "optimizer_step").action else {
                return;
            };
            reads[1] = reads[0].clone();
        }),
    ];
    let plan = gpt2(&["precision.compute=fp32"]);
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn copies_of_parameters() {
    fn copy(p: &Plan) -> (GroupId, BufferId) {
        let mut groups = p.groups.iter_enumerated();
        groups.find_map(|(g, group)| Some((g, group.copies.first()?.buffer))).expect("a copy")
    }
    /// The step that writes it, and which of its results that is.
    fn step(p: &mut Plan) -> (&mut frit_ir::plan::Task, usize) {
        let (_, copy) = copy(p);
        let writes = |a: &Action| a.writes().iter().any(|p| p.buffer == copy);
        let task = task(p, writes);
        let at = task.action.writes().iter().position(|p| p.buffer == copy).expect("a result");
        (task, at)
    }
    /// The step with another body for this copy.
    fn with_cast_of(p: &mut Plan, which: usize) {
        let added = KernelId(p.kernels.len());
        let (task, at) = step(p);
        let Action::Kernel { kernel, .. } = &mut task.action else { return };
        let index = std::mem::replace(kernel, added);
        let mut body = p.kernels[index].body.clone();
        let other = body.outputs[which].value;
        let cast = body.def(body.outputs[at].value).op.clone();
        let added = body.add(cast, &[other], frit_ir::Origin::none(), Region::Forward);
        body.outputs[at].value = added.expect("a cast")[0];
        let Kernel { name, entry, .. } = p.kernels[index].clone();
        p.kernels.push(Kernel::new(name, body, entry));
    }
    let cases: [(&str, Break); 5] = [
        ("P318", |p| {
            let (task, at) = step(p);
            let Action::Kernel { writes, .. } = &mut task.action else { return };
            writes[at].buffer = writes[0].buffer;
        }),
        // The cast of a moment.
        ("P318", |p| with_cast_of(p, 1)),
        ("P318", |p| {
            let (_, copy) = copy(p);
            let Some(zero) = p.tasks.iter().position(|t| matches!(t.action, Action::Zero { .. }))
            else {
                return;
            };
            let ty = frit_ir::TensorType::new(DType::BF16, [8]);
            let Action::Zero { places } = &mut p.tasks[TaskId(zero)].action else { return };
            places.push(Place { buffer: copy, offset: 0, ty });
        }),
        // Something else changes the parameters.
        ("P318", |p| {
            let master = p.groups[copy(p).0].master;
            let Some(zero) = p.tasks.iter().position(|t| matches!(t.action, Action::Zero { .. }))
            else {
                return;
            };
            let ty = frit_ir::TensorType::new(DType::F32, [8]);
            let Action::Zero { places } = &mut p.tasks[TaskId(zero)].action else { return };
            places.push(Place { buffer: master, offset: 0, ty });
        }),
        ("P001", |p| {
            let (group, _) = copy(p);
            p.groups[group].copies[0].dtype = DType::F32;
        }),
    ];
    let settings = ["precision.compute=bf16", "run.accumulation=2"];
    let plan = plan("tests/models/gpt2/model.onnx", 8, &settings).compiled.plan;
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn averages_and_parameter_groups() {
    fn segmented(p: &mut Plan) -> &mut frit_ir::plan::Group {
        p.groups.iter_mut().find(|g| g.param_group_offsets.is_some()).expect("two parameter groups")
    }
    let cases: [(&str, Break); 4] = [
        ("P317", |p| drop_task(kernel(p, "ema_step"))),
        ("P317", |p| {
            let flag = kernel(p, "ema_step").action.reads()[4].buffer;
            let other = kernel(p, "ema_step").action.reads()[3].clone();
            let Action::Kernel { reads, .. } = &mut kernel(p, "ema_step").action else { return };
            reads.iter_mut().filter(|r| r.buffer == flag).for_each(|r| *r = other.clone());
        }),
        ("P312", |p| segmented(p).param_groups[1].offset += 1),
        // The table that the step reads is not the group's.
        ("P312", |p| {
            let offsets = segmented(p).param_group_offsets.expect("a table");
            let table = Buffer { offset: p.persistent_bytes, ..p.buffers[offsets].clone() };
            let other = p.buffers.push_and_get_key(table);
            p.persistent_bytes += 256;
            segmented(p).param_group_offsets = Some(other);
        }),
    ];
    let keys = ["precision.compute=fp32", "optimizer.ema=0.9", "optimizer.decay=matrices"];
    let plan = gpt2(&keys);
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn steps_of_adafactor() {
    /// The tasks that are this part of a step.
    fn parts(p: &mut Plan, part: AdafactorPart) -> Vec<&mut Action> {
        let of = |k: &Kernel| {
            k.body.nodes().any(|(_, n)| matches!(&n.op, Op::Adafactor(op) if op.part == part))
        };
        let kernels: TiVec<KernelId, bool> = p.kernels.iter().map(of).collect();
        let is_part = |a: &Action| matches!(a, Action::Kernel { kernel, .. } if kernels[*kernel]);
        p.tasks.iter_mut().map(|t| &mut t.action).filter(|a| is_part(a)).collect()
    }
    /// An operand of such a task becomes that of another one of the same kernel.
    fn exchange(p: &mut Plan, part: AdafactorPart, operand: usize) {
        let mut kernels = std::collections::HashMap::new();
        for action in parts(p, part) {
            let Action::Kernel { kernel, reads, .. } = action else { continue };
            match kernels.get(kernel) {
                None => {
                    kernels.insert(*kernel, reads[operand].clone());
                }
                Some(other) => {
                    reads[operand] = other.clone();
                    return;
                }
            }
        }
        panic!("no two parameters of one shape");
    }
    fn unsummed(p: &mut Plan, name: &str) {
        let of = |t: &&mut frit_ir::plan::Task| t.name == name;
        drop_task(p.tasks.iter_mut().find(of).expect("it is reduced"));
    }
    let cases: [(&str, Break); 9] = [
        ("P302", |p| *parts(p, AdafactorPart::Step)[0] = Action::Zero { places: vec![] }),
        ("P315", |p| exchange(p, AdafactorPart::Sums, 0)),
        ("P315", |p| exchange(p, AdafactorPart::Moments, 2)),
        ("P315", |p| exchange(p, AdafactorPart::Moments, 3)),
        ("P315", |p| exchange(p, AdafactorPart::Step, 3)),
        ("P315", |p| exchange(p, AdafactorPart::Step, 4)),
        ("P315", |p| exchange(p, AdafactorPart::Step, 5)),
        ("P311", |p| unsummed(p, "all_reduce adafactor sums")),
        ("P311", |p| unsummed(p, "all_reduce adafactor updates")),
    ];
    let plan = gpt2(&["precision.compute=fp32", "optimizer.kind=adafactor"]);
    for (i, (code, change)) in cases.into_iter().enumerate() {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "case {i}: {code}: found {codes:?}");
    }
}

#[test]
fn steps_of_muon() {
    fn reads<'a>(p: &'a mut Plan, op: &str) -> &'a mut Vec<Place> {
        match &mut kernel(p, op).action {
            Action::Kernel { reads, .. } => reads,
            _ => unreachable!("a kernel"),
        }
    }
    /// The buffer of a hyper-parameter, as an operand.
    fn hyper(p: &Plan, name: &str) -> BufferId {
        p.hyper.iter().find(|h| h.name == name).expect("a hyper-parameter").buffer
    }
    fn replace(p: &mut Plan, from: &str, to: &str) {
        let (from, to) = (hyper(p, from), hyper(p, to));
        for task in p.tasks.iter_mut() {
            if let Action::Kernel { reads, .. } = &mut task.action {
                reads.iter_mut().filter(|r| r.buffer == from).for_each(|r| r.buffer = to);
            }
        }
    }
    fn is_direction(a: &Action) -> bool {
        matches!(a, Action::AllGather { send, .. } if send.ty.dtype == DType::BF16)
    }
    /// The kernels that mix matrices, of the last iteration of a matrix first.
    fn mixes(p: &mut Plan) -> Vec<&mut frit_ir::plan::Task> {
        let ops = |k: &Kernel| {
            let nodes = k.body.nodes().map(|(_, n)| n.op.name());
            nodes.filter(|name| *name != "input").collect::<Vec<_>>()
        };
        let is_mix = |k: &Kernel| ops(k) == ["cast", "mul", "add", "cast"];
        let kernels: TiVec<KernelId, bool> = p.kernels.iter().map(is_mix).collect();
        let runs = |a: &Action| matches!(a, Action::Kernel { kernel, .. } if kernels[*kernel]);
        p.tasks.iter_mut().rev().filter(|t| runs(&t.action)).collect()
    }
    let cases: [(&str, Break); 16] = [
        // Momentum of another gradient, scaled by something else, clipped by something else, with another momentum.
        ("P319", |p| {
            let read = reads(p, "muon_momentum")[0].clone();
            let alike = |g: &&frit_ir::plan::GradientSpec| g.place != read && g.place.ty == read.ty;
            let other = p.gradients.iter().find(alike).expect("blocks are alike").place.clone();
            reads(p, "muon_momentum")[0] = other;
        }),
        ("P319", |p| {
            let reads = reads(p, "muon_momentum");
            reads[4] = reads[2].clone();
        }),
        ("P319", |p| {
            let reads = reads(p, "muon_momentum");
            reads[5] = reads[2].clone();
        }),
        ("P319", |p| replace(p, "optimizer.clip_grad_value", "optimizer.muon_momentum")),
        ("P319", |p| replace(p, "optimizer.muon_momentum", "optimizer.lr")),
        // No momentum, no step, no orthogonalization, no part of the whole.
        ("P319", |p| drop_task(kernel(p, "muon_momentum"))),
        ("P302", |p| drop_task(kernel(p, "muon_step"))),
        ("P319", |p| drop_task(mixes(p).remove(0))),
        ("P319", |p| drop_task(task(p, |a| matches!(a, Action::Reshard { .. })))),
        ("P319", |p| drop_task(task(p, is_direction))),
        // Another coefficient, least norm, or whether the step is skipped.
        ("P319", |p| replace(p, "optimizer.muon_ns_a", "optimizer.muon_ns_c")),
        ("P319", |p| replace(p, "optimizer.muon_ns_eps", "optimizer.eps")),
        ("P319", |p| {
            let other = reads(p, "muon_momentum")[2].clone();
            let flag = reads(p, "muon_step").last_mut().expect("a flag");
            *flag = other;
        }),
        // An iteration less.
        ("P319", |p| {
            let mut mixes = mixes(p);
            let [last, before] = [0, 1].map(|i| mixes[i].action.clone());
            let (Action::Kernel { writes: to, .. }, Action::Kernel { kernel, reads, .. }) =
                (last, before)
            else {
                unreachable!("kernels");
            };
            mixes[0].action = Action::Kernel { kernel, reads, writes: to };
        }),
        // The rates of another rule.
        ("P319", |p| {
            let of = |k: &&mut Kernel| k.body.nodes().any(|(_, n)| n.op.name() == "muon_step");
            let step = p.kernels.iter_mut().find(of).expect("a step");
            let text = step.body.to_string();
            let text = text.replace("original", "match_rms_adamw");
            let body = frit_ir::text::parse(&text).expect("a body");
            *step = Kernel::new(step.name.clone(), body, step.entry.clone());
        }),
        // The part of another rank, or of the momentum that is not orthogonalized.
        ("P319", |p| {
            let sent = match &task(p, is_direction).action {
                Action::AllGather { send, .. } => send.clone(),
                _ => unreachable!("a gather"),
            };
            reads(p, "muon_step")[1] = sent;
        }),
    ];
    let plan = gpt2(&["precision.compute=fp32", "optimizer.kind=muon"]);
    for (i, (code, change)) in cases.into_iter().enumerate() {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "case {i}: {code}: found {codes:?}");
    }
}

/// The task that adds gradients to a sum in a tree, or the statistics if `statistics`.
fn tree(plan: &mut Plan, statistics: bool) -> &mut frit_ir::plan::Task {
    let states: Vec<BufferId> =
        plan.groups.iter().flat_map(|g| &g.states).map(|s| s.buffer).collect();
    let is_tree: TiVec<KernelId, bool> = plan
        .kernels
        .iter()
        .map(|k| k.body.nodes().any(|(_, n)| n.op.name() == "tree_sum"))
        .collect();
    task(plan, |a| match a {
        Action::Kernel { kernel, writes, .. } if is_tree[*kernel] => {
            states.contains(&writes[0].buffer) != statistics
        }
        _ => false,
    })
}

/// Where the number of the micro-step is.
fn number(plan: &Plan) -> BufferId {
    let is_number = |s: &&frit_ir::plan::StateSpec| s.name == StateName::MicroStep;
    plan.states.iter().find(is_number).expect("several micro-steps").buffer
}

/// The kernel rounds its first result to bf16.
fn round(plan: &mut Plan, kernel: KernelId) {
    let kernel = &mut plan.kernels[kernel];
    let (output, text) = (kernel.body.outputs[0].value, kernel.body.to_string());
    let shape = &kernel.body.ty(output).shape;
    let (nodes, returned) = text.split_once("  return %").expect("results");
    let (name, rest) = returned.split_once(' ').expect("a name");
    let text = format!(
        "{nodes}  %narrow: bf16{shape} = cast %{name} {{to = \"bf16\"}}\n  %wide: f32{shape} = cast %narrow {{to = \"f32\"}}\n  \
         return %wide {rest}"
    );
    let body = frit_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    *kernel = Kernel::new(kernel.name.clone(), body, kernel.entry.clone());
}

#[test]
fn what_depends_on_the_number_of_ranks() {
    let cases: [(&str, Break); 11] = [
        // What waits at one level is exchanged with what waits at the next, when it is read or always.
        ("P310", |p| {
            let Action::Kernel { reads, .. } = &mut tree(p, false).action else { return };
            reads.swap(2, 3);
        }),
        ("P310", |p| {
            let Action::Kernel { reads, writes, .. } = &mut tree(p, false).action else { return };
            reads.swap(2, 3);
            writes.swap(0, 1);
        }),
        // A sum is never made.
        ("P320", |p| drop_task(tree(p, false))),
        // Micro-steps are not counted, or not from zero.
        ("P310", |p| {
            let number = number(p);
            drop_task(task(p, |a| {
                !matches!(a, Action::Zero { .. }) && a.writes().iter().any(|w| w.buffer == number)
            }));
        }),
        ("P310", |p| {
            let number = number(p);
            for task in &mut p.tasks {
                if let Action::Zero { places } = &mut task.action {
                    places.retain(|place| place.buffer != number);
                }
            }
        }),
        // Loss and count are not added.
        ("P320", |p| drop_task(tree(p, true))),
        // Ranks exchange activations.
        ("P320", |p| {
            let micro_step = p.tasks_of(PhaseName::MicroStep);
            let is_f32 = |t: &TaskId| {
                let action = &p.tasks[*t].action;
                matches!(action, Action::Kernel { .. }) && action.writes()[0].ty.dtype == DType::F32
            };
            let first = micro_step.start.until(micro_step.end).find(is_f32).expect("a kernel");
            let send = p.tasks[first].action.writes()[0].clone();
            let recv = send.clone();
            let reduce = ReduceKind::Sum;
            p.tasks[first].action = Action::AllReduce { group: None, reduce, send, recv };
        }),
        // Loss, count and norm are rounded before ranks exchange them, or by the exchange.
        ("P320", |p| {
            let Action::Kernel { kernel, .. } = kernel(p, "grad_stats").action else { return };
            round(p, kernel);
        }),
        ("P320", |p| {
            let exchange = |a: &Action| matches!(a, Action::AllReduce { group: None, .. });
            if let Action::AllReduce { send, recv, .. } = &mut task(p, exchange).action {
                (send.ty.dtype, recv.ty.dtype) = (DType::BF16, DType::BF16);
            }
        }),
        // What waits is rounded.
        ("P320", |p| {
            let Action::Kernel { kernel, .. } = tree(p, true).action else { return };
            round(p, kernel);
        }),
        // Gradients are averaged, so that their factor depends on the ranks.
        ("P203", |p| {
            let Action::ReduceScatter { reduce, .. } = &mut task(p, is_reduction).action else {
                return;
            };
            *reduce = ReduceKind::Mean;
        }),
    ];
    let plan = gpt2(&["precision.compute=fp32", "run.reproducible=8"]);
    for (n, (code, change)) in cases.into_iter().enumerate() {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{n}, {code}: found {codes:?}");
    }
}

#[test]
fn the_factor_of_every_gradient() {
    let accumulating = gpt2(&["precision.compute=fp16", "run.accumulation=2"]);
    let cases: [(&str, Break); 4] = [
        // Averaged twice, or not at all.
        ("P308", |p| p.loss_capacity *= 2),
        ("P308", |p| {
            let Action::ReduceScatter { reduce, .. } = &mut task(p, is_reduction).action else {
                return;
            };
            *reduce = ReduceKind::Sum;
        }),
        // A product of the sums and the gradients.
        ("P309", |p| {
            let sums: Vec<BufferId> =
                p.groups.iter().flat_map(|g| &g.states).map(|s| s.buffer).collect();
            let add = p.tasks.iter().find_map(|t| match &t.action {
                Action::Kernel { kernel, reads, writes }
                    if reads[0] == writes[0] && sums.contains(&reads[0].buffer) =>
                {
                    Some(*kernel)
                }
                _ => None,
            });
            let kernel = &mut p.kernels[add.expect("an accumulation")];
            let is_add = |(_, n): &(_, &frit_ir::Node)| n.op.name() == "add";
            let add = kernel.body.nodes().find(is_add).expect("an addition").0;
            kernel.body.node_mut(add).op = Op::Binary(BinaryFn::Mul);
            kernel.bind();
        }),
        // The sums of the step before are kept.
        ("P310", |p| {
            let sums: Vec<BufferId> =
                p.groups.iter().flat_map(|g| &g.states).map(|s| s.buffer).collect();
            for task in &mut p.tasks {
                if let Action::Zero { places } = &mut task.action {
                    places.retain(|place| !sums.contains(&place.buffer));
                }
            }
        }),
    ];
    for (code, change) in cases {
        let codes = codes(&accumulating, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

/// What a gradient may pass through, by the row of each operation.
#[test]
fn operations_that_are_not_linear() {
    let plan = gpt2(&["precision.compute=fp32"]);
    let cases: [Op; 6] = [
        Op::Unary(UnaryFn::Abs),
        Op::Unary(UnaryFn::Relu),
        Op::Unary(UnaryFn::Sqrt),
        Op::Clip(Clip { min: Some(0.0), max: None }),
        Op::Cast(Cast { to: DType::I32 }),
        Op::Unary(UnaryFn::Sigmoid),
    ];
    for op in cases {
        let mut broken = plan.clone();
        // After the seed, its one operation gets another one behind it.
        let at = broken
            .kernels
            .position(|k| k.body.nodes().any(|(_, n)| matches!(n.op, Op::LossScale(_))))
            .expect("the seed");
        let body = &mut broken.kernels[at].body;
        // The gradient, not the loss.
        let result = body.outputs.len() - 1;
        let output = body.outputs[result].value;
        let ty = body.ty(output).clone();
        let flat = Op::Reshape(Reshape { shape: Shape::from([ty.shape.numel()]) });
        let back = Op::Reshape(Reshape { shape: ty.shape.clone() });
        let cast = Op::Cast(Cast { to: ty.dtype });
        let region = frit_ir::Region::Backward;
        let mut add = |op: &Op, v| {
            body.add1(op.clone(), &[v], frit_ir::Origin::none(), region).expect("fits")
        };
        let flat = add(&flat, output);
        let wrong = add(&op, flat);
        let wrong = add(&cast, wrong);
        let wrong = add(&back, wrong);
        body.outputs[result].value = wrong;
        broken.kernels[at].bind();
        let found = verify_plan(&broken).expect_err("the plan is broken");
        assert!(found.iter().any(|d| d.code == "P309"), "{op:?}: {found:?}");
    }
}

#[test]
fn magnitudes_of_8_bit_floats() {
    let cases: [(&str, Break); 4] = [
        // Ranks would go on with different scales.
        ("P314", |p| {
            let most = |a: &Action| matches!(a, Action::AllReduce { reduce: ReduceKind::Max, .. });
            let Action::AllReduce { reduce, .. } = &mut task(p, most).action else { return };
            *reduce = ReduceKind::Sum;
        }),
        ("P314", |p| {
            let renews = p.tasks.iter_mut().find(|t| t.name == "commit amax_history");
            renews.expect("a commit").action = Action::Zero { places: vec![] };
        }),
        // A tensor without a row, and one in two formats.
        ("P314", |p| {
            p.states.iter_mut().filter(|s| s.name == StateName::AmaxHistory).for_each(|s| {
                s.ty.shape.0[0] -= 1;
            })
        }),
        ("P314", |p| {
            let rounds = |k: &&mut Kernel| k.name.starts_with("quantize");
            for kernel in p.kernels.iter_mut().filter(rounds) {
                let is = |(_, n): &(_, &frit_ir::Node)| matches!(n.op, Op::Quantize(_));
                let id = kernel.body.nodes().find(is).expect("rounding").0;
                let Op::Quantize(op) = &mut kernel.body.node_mut(id).op else { continue };
                op.index = 0;
                kernel.bind();
            }
        }),
    ];
    let plan =
        plan("tests/models/gpt2/model.onnx", 4, &["sharding.ranks=2", "precision.compute=fp8"]);
    for (code, change) in cases {
        let codes = codes(&plan.compiled.plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn means_of_activations_over_ranks() {
    let settings = ["sharding.ranks=2", "precision.compute=fp32", "model.batch_norm=sync"];
    let plan = plan("tests/models/resnet/model.onnx", 2, &settings).compiled.plan;
    let cases: [(&str, Break); 3] = [
        // What the forward pass summed, or did not combine, the backward pass cannot average.
        ("P309", |p| {
            let first = task(p, |a| matches!(a, Action::AllReduce { group: None, .. }));
            let Action::AllReduce { reduce, .. } = &mut first.action else { return };
            *reduce = ReduceKind::Sum;
        }),
        ("P309", |p| {
            let first = task(p, |a| matches!(a, Action::AllReduce { group: None, .. }));
            let (from, to) = (first.action.reads()[0].clone(), first.action.writes()[0].clone());
            first.action = Action::Copy { from, to };
        }),
        // Cotangents that are summed, not averaged, were of all ranks already.
        ("P309", |p| {
            let backward = |t: &&mut frit_ir::plan::Task| {
                t.region == Region::Backward
                    && matches!(t.action, Action::AllReduce { group: None, .. })
            };
            let first = p.tasks.iter_mut().find(backward).expect("a mean of cotangents");
            let Action::AllReduce { reduce, .. } = &mut first.action else { return };
            *reduce = ReduceKind::Sum;
        }),
    ];
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

#[test]
fn parts_that_few_ranks_keep() {
    let keys = ["sharding.ranks=4", "sharding.reshard_after_forward=2", "sharding.wrap=size=8000"];
    let plan = gpt2(&[&["precision.compute=fp32"], &keys[..]].concat());
    fn gathers(p: &mut Plan) -> Vec<&mut Action> {
        let actions = p.tasks.iter_mut().map(|t| &mut t.action);
        actions.filter(|a| matches!(a, Action::AllGather { ranks: Some(_), .. })).collect()
    }
    let cases: [(&str, Break); 6] = [
        ("P206", |p| drop_task(task(p, |a| matches!(a, Action::Reshard { .. })))),
        // The part that another unit's ranks kept.
        ("P206", |p| {
            let mut gathers = gathers(p);
            let other = gathers[1].reads()[0].clone();
            let size = other.ty.shape.numel();
            let of_size = |a: &&mut &mut Action| a.reads()[0].ty.shape.numel() == size;
            let same = gathers.iter_mut().filter(of_size).find(|a| *a.reads()[0] != other);
            *same.expect("two units of one size").reads_mut()[0] = other;
        }),
        // A part of what was not gathered from all.
        ("P206", |p| {
            let Action::Reshard { from, .. } =
                &mut task(p, |a| matches!(a, Action::Reshard { .. })).action
            else {
                return;
            };
            let bytes = from.ty.bytes();
            let is_other =
                |b: &frit_ir::plan::Buffer| b.class == BufferClass::Gradient && b.bytes >= bytes;
            let other = p.buffers.position(is_other).expect("a gradient");
            let Action::Reshard { from, .. } =
                &mut task(p, |a| matches!(a, Action::Reshard { .. })).action
            else {
                return;
            };
            from.buffer = other;
        }),
        ("P206", |p| p.units.iter_mut().for_each(|u| u.reshard = None)),
        ("P001", |p| {
            let Action::Reshard { ranks, .. } =
                &mut task(p, |a| matches!(a, Action::Reshard { .. })).action
            else {
                return;
            };
            *ranks = 4;
        }),
        ("P001", |p| {
            if let Action::AllGather { ranks, .. } = &mut *gathers(p)[0] {
                *ranks = None;
            }
        }),
    ];
    for (i, (code, change)) in cases.into_iter().enumerate() {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "case {i}: {code}: found {codes:?}");
    }
}

#[test]
fn statistics_of_replicas() {
    let group = ["sharding.strategy=hybrid_shard", "sharding.shard_group=2", "sharding.ranks=4"];
    let plan = gpt2(&[&["precision.compute=fp32"], &group[..]].concat());
    let cases: [(&str, Break); 3] = [
        // Summed with the replicas, as if every rank held a part of its own.
        ("P311", |p| {
            let statistics = |a: &Action| matches!(a, Action::AllReduce { group: None, .. });
            let Action::AllReduce { reduce, .. } = &mut task(p, statistics).action else { return };
            *reduce = ReduceKind::Mean;
        }),
        // Replicas that are not averaged.
        ("P203", |p| drop_task(task(p, |a| matches!(a, Action::AllReduce { group: Some(_), .. })))),
        ("P308", |p| {
            let replicas = |a: &Action| matches!(a, Action::AllReduce { group: Some(_), .. });
            let action = &mut task(p, replicas).action;
            let (from, to) = (action.reads()[0].clone(), action.writes()[0].clone());
            *action = Action::Copy { from, to };
        }),
    ];
    for (code, change) in cases {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}: found {codes:?}");
    }
}

/// The first copy in such a direction.
fn host_copy(plan: &mut Plan, direction: Stream) -> &mut frit_ir::plan::Task {
    let is = |t: &&mut frit_ir::plan::Task| t.stream == direction;
    plan.tasks.iter_mut().find(is).expect("a copy")
}

/// The copies of the update in such a direction, by position.
fn copies_of_update(plan: &Plan, direction: Stream) -> Vec<TaskId> {
    let update = plan.phase(PhaseName::Update).expect("an update");
    update.tasks().filter(|i| plan.tasks[*i].stream == direction).collect()
}

#[test]
fn host_memory() {
    let plan = gpt2(&["precision.compute=fp32", "memory.offload=parameters"]);
    let cases: [(&str, Break); 9] = [
        // The optimizer, or a gather, on what is on the host.
        ("P501", |p| {
            let Action::Copy { from, to } = host_copy(p, Stream::CopyIn).action.clone() else {
                return;
            };
            for place in p.tasks.iter_mut().flat_map(|t| t.action.reads_mut()) {
                if place.buffer == to.buffer {
                    place.buffer = from.buffer;
                }
            }
        }),
        ("P501", |p| {
            let place = host_copy(p, Stream::CopyIn).action.reads()[0].clone();
            host_copy(p, Stream::CopyIn).action = Action::Zero { places: vec![place] };
        }),
        // A copy in the other direction's stream, and among kernels.
        ("P502", |p| host_copy(p, Stream::CopyIn).stream = Stream::CopyOut),
        ("P502", |p| host_copy(p, Stream::CopyOut).stream = Stream::Compute),
        // An update that is not kept, or starts from what is not there.
        ("P106", |p| {
            let last = *copies_of_update(p, Stream::CopyOut).last().expect("a copy");
            p.tasks[last].action = Action::Zero { places: vec![] };
            p.tasks[last].stream = Stream::Compute;
        }),
        ("P102", |p| {
            let first = copies_of_update(p, Stream::CopyIn)[0];
            p.tasks[first].action = Action::Zero { places: vec![] };
            p.tasks[first].stream = Stream::Compute;
        }),
        // Copies that wait for nothing: before the update is done, into bytes that are in use.
        ("P104", |p| clear_waits(p, Stream::CopyOut)),
        ("P103", |p| clear_waits(p, Stream::CopyIn)),
        // A moment in the place of the other.
        ("P106", |p| {
            let copies = copies_of_update(p, Stream::CopyIn);
            let from = |p: &Plan, i: TaskId| p.tasks[i].action.reads()[0].clone();
            let size = |p: &Plan, i: TaskId| from(p, i).ty.bytes();
            let moments: Vec<TaskId> = copies
                .iter()
                .copied()
                .filter(|i| p.buffers[from(p, *i).buffer].class == BufferClass::OptimizerState)
                .collect();
            let [a, b] = [moments[0], moments[1]];
            assert_eq!(size(p, a), size(p, b));
            let (first, second) = (from(p, a), from(p, b));
            *p.tasks[a].action.reads_mut()[0] = second;
            *p.tasks[b].action.reads_mut()[0] = first;
        }),
    ];
    for (n, (code, change)) in cases.into_iter().enumerate() {
        let codes = codes(&plan, change);
        assert!(codes.iter().any(|c| c == code), "{code}, case {n}: found {codes:?}");
    }
}

#[test]
fn the_meaning_of_the_program() {
    let plan = gpt2(&["precision.compute=fp32"]);
    let cases: [(&str, Break); 3] = [
        // Operands of one type, the other way round: of a gradient operation, whose first one is linear.
        ("P309", |p| {
            let two = |a: &Action| {
                matches!(a, Action::Kernel { reads, .. }
                    if reads.len() == 2 && reads[0].ty == reads[1].ty && reads[0] != reads[1])
            };
            let Action::Kernel { reads, .. } = &mut task(p, two).action else { return };
            reads.swap(0, 1);
        }),
        // A state that is never renewed.
        ("P106", |p| {
            let commit = p.tasks.iter_mut().find(|t| t.name == "commit step").expect("a commit");
            commit.action = Action::Zero { places: vec![] };
        }),
        // A parameter's values at another one's place.
        ("P106", |p| {
            let group = p.groups.position(|g| g.segments.len() > 1).expect("a group");
            let segments = &mut p.groups[group].segments;
            let same = |w: &[frit_ir::plan::Segment]| w[0].numel == w[1].numel;
            let at = segments.windows(2).position(same).expect("two of one size");
            let [a, b] = [segments[at], segments[at + 1]];
            (segments[at].param, segments[at + 1].param) = (b.param, a.param);
            p.params[b.param].home = ParamHome::Group { group, offset: a.offset };
            p.params[a.param].home = ParamHome::Group { group, offset: b.offset };
        }),
    ];
    for (code, change) in cases {
        assert_eq!(codes(&plan, change)[0], code);
    }
}

#[test]
fn inputs_that_are_read_as_indices() {
    let (labels, ids) = ("labels", "input_ids");
    let plan = gpt2(&[]);
    let of = |plan: &Plan, name: &str| plan.inputs.iter().position(|i| i.name == name);
    let (labels, ids) = (of(&plan, labels).expect("labels"), of(&plan, ids).expect("ids"));
    type Break = (&'static str, usize, fn(&mut IndexRange));
    let breaks: [Break; 5] = [
        ("P601", labels, |r| r.hi += 1),
        ("P601", labels, |r| r.lo = -1),
        ("P601", labels, |r| r.ignore = Some(-1)),
        ("P601", ids, |r| r.hi += 1),
        ("P001", ids, |r| r.within = vec![(0, usize::MAX)]),
    ];
    for (code, input, change) in breaks {
        let mut broken = plan.clone();
        broken.inputs[input].ranges.iter_mut().for_each(change);
        let found = verify_plan(&broken).expect_err("it is broken");
        assert_eq!(found[0].code, code);
    }
    let mut narrower = plan.clone();
    narrower.inputs[ids].ranges.iter_mut().for_each(|r| (r.lo, r.hi) = (0, 3));
    verify_plan(&narrower).expect("fewer values are as good");
    let mut unchecked = plan;
    unchecked.inputs[ids].ranges.clear();
    assert_eq!(verify_plan(&unchecked).expect_err("it is broken")[0].code, "P601");
}

/// The first kernel that launches a generated one whose last operation is `op`, its candidates, and that kernel.
fn launching<'a>(plan: &'a mut Plan, op: &str) -> (KernelId, &'a mut Vec<Candidate>, KernelId) {
    let last = |k: &Kernel| k.body.nodes().next_back().is_some_and(|(_, n)| n.op.name() == op);
    let last: TiVec<KernelId, bool> = plan.kernels.iter().map(last).collect();
    let launched = |launches: &Launches| {
        launches.every_launch().into_iter().find_map(|launch| match launch {
            Launch::Generated(launch) if last[launch.kernel] => Some(launch.kernel),
            _ => None,
        })
    };
    for (id, kernel) in plan.kernels.iter_mut_enumerated() {
        let Entry::Launches(selected) = &mut kernel.entry else { continue };
        let Some(generated) = launched(selected) else { continue };
        let [Launch::Choice(candidates)] = &mut selected.launches[..] else { continue };
        return (id, candidates, generated);
    }
    panic!("nothing launches a generated `{op}`")
}

/// Edits the candidates of the first kernel that launches such a generated one.
fn edit(plan: &mut Plan, op: &str, change: fn(&mut Vec<Candidate>)) {
    let (id, candidates, _) = launching(plan, op);
    change(candidates);
    plan.kernels[id].bind();
}

fn generated(candidates: &mut [Candidate]) -> &mut GeneratedLaunch {
    let launches = candidates.iter_mut().flat_map(|c| &mut c.launches);
    let mut all = launches.filter_map(|l| match l {
        Launch::Generated(launch) => Some(launch),
        _ => None,
    });
    all.next().expect("a generated kernel is launched")
}

fn fused(candidates: &mut [Candidate]) -> &mut Gemm {
    match &mut candidates[0].launches[0] {
        Launch::Gemm(gemm) => gemm,
        other => panic!("{other:?}"),
    }
}

/// Computes another function in a generated kernel.
fn replace(plan: &mut Plan, op: &str, by: Op) {
    let (_, _, kernel) = launching(plan, op);
    let kernel = &mut plan.kernels[kernel];
    let last = kernel.body.nodes().next_back().expect("a body").0;
    kernel.body.node_mut(last).op = by;
    kernel.bind();
}

/// A candidate, or all, that compute something else than the kernel's body.
#[test]
fn candidates_that_compute_something_else() {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    let plan = plan("tests/models/gpt2/model.onnx", 4, &cuda).compiled.plan;
    verify_plan(&plan).expect("as compiled");
    let cases: [Break; 14] = [
        // The function, or the operands, of a generated kernel.
        |p| replace(p, "gelu_tanh", Op::Unary(UnaryFn::Gelu)),
        |p| replace(p, "gelu_tanh_grad", Op::Binary(BinaryFn::Mul)),
        |p| edit(p, "gelu_tanh_grad", |c| generated(c).reads.swap(0, 1)),
        |p| edit(p, "gelu_tanh", |c| generated(c).writes.swap(0, 1)),
        |p| edit(p, "gelu_tanh_grad", |c| generated(c).reads[1] = Pointer::Write(0, 0)),
        // It is missing, or runs twice, or comes too early.
        |p| edit(p, "add", |c| drop(c[1].launches.pop())),
        |p| edit(p, "sum_to", |c| drop(c[1].launches.pop())),
        |p| {
            edit(p, "add", |c| {
                let again = c[1].launches[1].clone();
                c[1].launches.push(again);
            });
        },
        |p| edit(p, "gelu_tanh_grad", |c| c[1].launches.reverse()),
        // Another epilogue than that of the other candidate, or in both another than that of the body.
        |p| {
            edit(p, "gelu_tanh", |c| {
                fused(c).epilogue = Epilogue::Gelu { bias: None, before: None }
            })
        },
        |p| edit(p, "sum_to", |c| fused(c).epilogue = Epilogue::None),
        |p| {
            edit(p, "gelu_tanh", |c| {
                fused(c).epilogue = Epilogue::None;
                c[1].launches = c[0].launches.clone();
            });
        },
        |p| edit(p, "add", |c| fused(c).a.transposed ^= true),
        // A GEMM over a value that is still read.
        |p| {
            edit(p, "gelu_tanh_grad", |c| {
                let Launch::Gemm(gemm) = &mut c[1].launches[0] else { panic!("no GEMM") };
                gemm.b.at = gemm.d.at;
            });
        },
    ];
    for (i, change) in cases.into_iter().enumerate() {
        let found = codes(&plan, change);
        assert!(found.iter().all(|code| code == "P701"), "case {i}: {found:?}");
    }
}
