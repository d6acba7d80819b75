//! Plans on the CUDA device, with a driver that records calls: streams, events, launches and collectives are the
//! plan's, a step becomes one CUDA graph, and failures give one clear error.

use crate::support::{Planned, file, plan};
use frit_cuda::driver::{EventHandle, StreamHandle};
use frit_cuda::recording::{Call, Recording};
use frit_ir::plan::{
    Action, CandidateName, Entry, GroupId, Launch, PhaseName, Plan, Pointer, Stream, TaskId, Team,
};
use frit_runtime::RunError;
use frit_runtime::data::Element;
use frit_runtime::device::Device;
use frit_runtime::device::cuda::{Cuda, Limits, Ranks, doctor, extra_bytes};
use frit_runtime::plan_dir::PlanDir;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

fn planned(model: &str, ranks: usize, more: &[&str]) -> (Planned, PlanDir) {
    let ranks = format!("sharding.ranks={ranks}");
    let settings = [&["target.device=cuda", "target.arch=sm_80", ranks.as_str()], more].concat();
    let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &settings);
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    (planned, dir)
}

pub(crate) fn open(dir: &PlanDir, driver: Recording) -> Result<Cuda<'_, Recording>, RunError> {
    let ranks = Ranks { rank: 0, rendezvous: None, timeout: Duration::from_secs(60) };
    Cuda::new(dir, driver, ranks, Limits::of(None))
}

/// Feeds every input and runs the tasks before `end`; what the driver was asked for meanwhile.
pub(crate) fn step(device: &mut Cuda<'_, Recording>, plan: &Plan, end: TaskId) -> Vec<Call> {
    device.driver().take();
    for (buffer, ty) in plan.fed() {
        device.feed(buffer, Element::from(ty.dtype), &vec![0; ty.bytes()]).unwrap();
    }
    device.run(TaskId::FIRST..end).unwrap();
    device.driver().take()
}

/// The stream of a call that does work of a task.
fn work(call: &Call) -> Option<StreamHandle> {
    match call {
        Call::Launch(_, _, _, s)
        | Call::Multiply(_, _, s)
        | Call::Execute(_, _, s)
        | Call::Collective(_, _, _, s)
        | Call::Copy(_, _, _, s)
        | Call::Zero(_, _, s)
        | Call::CopyIn(_, _, s) => Some(*s),
        // Collectives leave a mark of four bytes.
        Call::CopyOut(_, bytes, s) if *bytes > 4 => Some(*s),
        _ => None,
    }
}

/// How many calls launches are where there is no cuDNN.
fn n_launches(plan: &Plan, launches: &[Launch]) -> usize {
    let calls = |launch: &Launch| match launch {
        Launch::Copy { bytes: 0, .. } | Launch::Zero { bytes: 0, .. } => 0,
        Launch::Choice(candidates) => {
            let without_cudnn = candidates.iter().find(|c| c.name != CandidateName::Cudnn);
            n_launches(plan, &without_cudnn.expect("a fallback").launches)
        }
        Launch::Generated(launch) => plan.kernels[launch.kernel].entry.symbols().len(),
        _ => 1,
    };
    launches.iter().map(calls).sum()
}

/// How many calls a task's work is.
fn n_calls(plan: &Plan, action: &Action) -> usize {
    match action {
        Action::Kernel { kernel, reads, writes } => {
            let kernel = &plan.kernels[*kernel];
            // What a result adds to is not copied if it is in its place.
            let in_place = |launch: &&Launch| match launch {
                Launch::Copy { from: Pointer::Read(i, 0), to: Pointer::Write(j, 0), .. } => {
                    reads[*i] == writes[*j]
                }
                _ => false,
            };
            match &kernel.entry {
                Entry::Cuda { launches, .. } => launches.len(),
                Entry::Launches(selected) => {
                    let skipped = selected.launches.iter().filter(in_place).count();
                    n_launches(plan, &selected.launches) - skipped
                }
                other => panic!("{other:?} on a GPU"),
            }
        }
        Action::Copy { from, to } => usize::from(from != to && from.ty.bytes() > 0),
        Action::Zero { places } => places.iter().filter(|p| p.ty.bytes() > 0).count(),
        _ => 1,
    }
}

/// Replays the calls of a whole step: every task's work lies on its stream's handle, and every wait of the
/// plan is ordered by streams and events. Returns the handles of the streams and the number of waits.
pub(crate) fn replay(plan: &Plan, calls: &[Call]) -> (BTreeMap<Stream, StreamHandle>, usize) {
    let mut handles: BTreeMap<Stream, StreamHandle> = BTreeMap::new();
    // The tasks before each stream's next call, and before each event.
    let mut before: BTreeMap<usize, BTreeSet<TaskId>> = BTreeMap::new();
    let mut marks: BTreeMap<usize, BTreeSet<TaskId>> = BTreeMap::new();
    let mut n_waits = 0;
    let mut calls = calls.iter();
    for (i, task) in plan.tasks.iter_enumerated() {
        let mut left = n_calls(plan, &task.action);
        while left > 0 {
            match calls.next().unwrap_or_else(|| panic!("task {i} has no calls")) {
                Call::Record(EventHandle(e), StreamHandle(s)) => {
                    marks.insert(*e, before.entry(*s).or_default().clone());
                }
                Call::Wait(StreamHandle(s), EventHandle(e)) => {
                    n_waits += 1;
                    let mark = marks.get(e).expect("an event is recorded before it is waited for");
                    before.entry(*s).or_default().extend(mark.iter().copied());
                }
                call => {
                    let Some(stream) = work(call) else { continue };
                    let handle = *handles.entry(task.stream).or_insert(stream);
                    assert_eq!(stream, handle, "task {i} `{}` is on another stream", task.name);
                    let ordered = before.entry(stream.0).or_default();
                    for wait in &task.waits {
                        assert!(ordered.contains(wait), "task {i} does not wait for {wait}");
                    }
                    left -= 1;
                    if left == 0 {
                        ordered.insert(i);
                    }
                }
            }
        }
    }
    let distinct: BTreeSet<usize> = handles.values().map(|s| s.0).collect();
    assert_eq!(distinct.len(), handles.len(), "streams of the plan share a stream");
    // After the last task everything comes back to the compute stream.
    for call in calls {
        match call {
            Call::Record(EventHandle(e), StreamHandle(s)) => {
                marks.insert(*e, before.entry(*s).or_default().clone());
            }
            Call::Wait(StreamHandle(s), EventHandle(e)) => {
                n_waits += 1;
                before.entry(*s).or_default().extend(marks[e].iter().copied());
            }
            _ => {}
        }
    }
    let all = &before[&handles[&Stream::Compute].0];
    for (i, task) in plan.tasks.iter_enumerated() {
        assert!(n_calls(plan, &task.action) == 0 || all.contains(&i), "task {i} is not joined");
    }
    (handles, n_waits)
}

/// Waits that the plan asks for, and those where the other streams leave the compute stream and come back.
fn expected_waits(plan: &Plan) -> usize {
    let crossing = |t: &frit_ir::plan::Task| {
        t.waits.iter().filter(|w| plan.tasks[**w].stream != t.stream).count()
    };
    let waits: usize = plan.tasks.iter().map(crossing).sum();
    let others = |p: &frit_ir::plan::Phase| {
        let used: BTreeSet<Stream> = plan.tasks[p.range()].iter().map(|t| t.stream).collect();
        2 * used.iter().filter(|s| **s != Stream::Compute).count()
    };
    waits + plan.phases.iter().map(others).sum::<usize>()
}

/// The plan's collectives in order: name and elements.
fn collectives(plan: &Plan) -> Vec<(&'static str, usize)> {
    let one = |action: &Action| match action {
        Action::AllGather { send, .. } => Some(("all_gather", send.ty.shape.numel())),
        Action::ReduceScatter { recv, .. } => Some(("reduce_scatter", recv.ty.shape.numel())),
        Action::AllReduce { send, .. } => Some(("all_reduce", send.ty.shape.numel())),
        _ => None,
    };
    plan.tasks.iter().filter_map(|t| one(&t.action)).collect()
}

/// From the delivery of the inputs on: what a step is made of.
pub(crate) fn body(calls: &[Call], n_inputs: usize) -> &[Call] {
    let copies = calls.iter().enumerate().filter(|(_, c)| matches!(c, Call::Copy(..)));
    let last = copies.map(|(i, _)| i).nth(n_inputs - 1).expect("the inputs are delivered");
    // One more call marks that the inputs were delivered.
    &calls[last + 2..]
}

fn check_steps(model: &str, ranks: usize, more: &[&str]) {
    let (_planned, dir) = planned(model, ranks, more);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let loading = device.driver().take();
    let urgent = |call: &Call| match call {
        Call::CreateStream(stream, true) => Some(*stream),
        _ => None,
    };
    let urgent: BTreeSet<usize> = loading.iter().filter_map(urgent).map(|s| s.0).collect();
    let allocated: Vec<usize> = loading
        .iter()
        .filter_map(|c| if let Call::Allocate(bytes) = c { Some(*bytes) } else { None })
        .collect();
    let given_back = loading.iter().filter(|c| matches!(c, Call::Free(_))).count();
    assert_eq!(allocated.len() - given_back, 1, "one allocation is kept");
    let all = allocated.last().expect("an allocation");
    assert!(*all >= plan.persistent_bytes + plan.workspace_bytes);

    let (end, n) = (plan.tasks.next_key(), plan.inputs.len());
    let first = step(&mut device, plan, end);
    let eager = body(&first, n).to_vec();
    let (streams, waits) = replay(plan, &eager);
    for (stream, handle) in streams {
        assert_eq!(urgent.contains(&handle.0), stream != Stream::Compute, "{stream:?}");
    }
    assert_eq!(waits, expected_waits(plan), "the waits are the plan's");
    let done: Vec<(&str, usize)> = eager
        .iter()
        .filter_map(|c| match c {
            Call::Collective(name, _, count, _) => Some((*name, *count)),
            _ => None,
        })
        .collect();
    assert_eq!(done, collectives(plan));

    let second = step(&mut device, plan, end);
    let [Call::BeginCapture(from), captured @ .., Call::EndCapture(to), Call::LaunchGraph(..)] =
        body(&second, n)
    else {
        panic!("the second step is captured and launched");
    };
    assert!(from == to && captured == eager, "what is captured is what was done");

    for _ in 0..3 {
        let calls = step(&mut device, plan, end);
        let rest = body(&calls, n);
        assert!(matches!(rest, [Call::LaunchGraph(_, on)] if on == from), "{rest:?}");
    }
}

#[test]
fn a_step_of_mlp_on_one_rank_is_the_plans() {
    check_steps("mlp", 1, &[]);
}

#[test]
fn a_step_of_gpt2_on_one_rank_is_the_plans() {
    check_steps("gpt2", 1, &[]);
}

#[test]
fn a_step_of_gpt2_on_four_ranks_is_the_plans() {
    check_steps("gpt2", 4, &[]);
}

#[test]
fn copies_from_and_to_the_host_run_on_streams_of_their_own() {
    check_steps("gpt2", 1, &["memory.offload=optimizer"]);
    check_steps("gpt2", 4, &["memory.offload=parameters", "run.accumulation=1"]);
}

#[test]
fn what_rests_on_the_host_is_pinned_copied_and_read_back() {
    let (_planned, dir) = planned("mlp", 1, &["memory.offload=parameters"]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let copied = |calls: &[Call]| {
        calls.iter().fold([0; 2], |[n_in, n_out], call| match call {
            Call::CopyIn(_, bytes, _) => [n_in + bytes, n_out],
            Call::CopyOut(_, bytes, _) => [n_in, n_out + bytes],
            _ => [n_in, n_out],
        })
    };
    let calls = step(&mut device, plan, plan.tasks.next_key());
    let summary = plan.summary();
    let expected = [summary.bytes_copied_in_per_step, summary.bytes_copied_out_per_step];
    assert_eq!(copied(body(&calls, plan.inputs.len())).map(|n| n as u64), expected);
    assert_eq!(device.usage().unwrap().host_bytes, plan.host_bytes);
    // The host reaches it without the device, once the device is idle.
    let master = plan.groups[GroupId(0)].master;
    device.driver().take();
    device.write(master, 8, &[1, 2, 3, 4]).unwrap();
    assert_eq!(device.read(master, 4, 8).unwrap(), [0, 0, 0, 0, 1, 2, 3, 4]);
    let calls = device.driver().take();
    assert_eq!(copied(&calls), [0, 0]);
    assert_eq!(calls.iter().filter(|c| matches!(c, Call::Reached(_))).count(), 2);
}

#[test]
fn collectives_of_replicated_shards_go_to_the_teams_that_the_plan_says() {
    let more = ["sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    let (_planned, dir) = planned("mlp", 4, &more);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let calls = step(&mut device, plan, plan.tasks.next_key());
    let used = calls.iter().filter_map(|c| match c {
        Call::Collective(_, team, _, _) => Some(device.driver().team(*team)),
        _ => None,
    });
    // Rank 0 shards with rank 1 and replicates with rank 2.
    let teams: Vec<Option<Team>> = plan
        .tasks
        .iter()
        .filter_map(|t| plan.team(&t.action, 0))
        .map(|team| (team.count < 4).then_some(team))
        .collect();
    assert!(used.eq(teams.iter().copied()));
    for expected in [[0, 1], [0, 2]] {
        let is = |t: &Option<Team>| {
            t.is_some_and(|t| {
                t.first == expected[0] && t.count == 2 && t.first + t.stride == expected[1]
            })
        };
        assert!(teams.iter().any(is), "{teams:?}");
    }
}

#[test]
fn accumulation_is_one_launch_per_micro_step_and_the_host_never_waits_for_the_step_itself() {
    let (_planned, dir) = planned("mlp", 2, &["run.accumulation=2"]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((8, 0))).unwrap();
    let micro = plan.phase(PhaseName::MicroStep).expect("a phase").end;
    let end = plan.tasks.next_key();
    for number in 0..5 {
        let calls = [step(&mut device, plan, micro), step(&mut device, plan, end)].concat();
        let launches = calls.iter().filter(|c| matches!(c, Call::LaunchGraph(..))).count();
        let kernels = calls.iter().filter(|c| matches!(c, Call::Launch(..))).count();
        match number {
            0 => assert!(launches == 0 && kernels > 0),
            1 => assert!(launches == 2 && kernels > 0),
            _ => assert!(launches == 2 && kernels == 0),
        }
        // The host asks only whether inputs fed two micro-steps ago were copied: marks of the stream on
        // which inputs come.
        let copying = calls.iter().find_map(|c| match c {
            Call::CopyIn(_, _, on) => Some(*on),
            _ => None,
        });
        let copied: BTreeSet<usize> = calls
            .iter()
            .filter_map(|c| match c {
                Call::Record(e, on) if Some(*on) == copying => Some(e.0),
                _ => None,
            })
            .collect();
        for call in &calls {
            assert!(!matches!(call, Call::Reached(e) if !copied.contains(&e.0)), "{call:?}");
        }
        device.note_metrics().unwrap();
        if number > 0 {
            assert_eq!(device.take_metrics().unwrap().len(), plan.metrics.len());
        }
    }
}

/// Names of what a step multiplies and launches.
fn work_of_step(device: &mut Cuda<'_, Recording>, plan: &Plan) -> (Vec<String>, Vec<String>) {
    let calls = step(device, plan, plan.tasks.next_key());
    let gemms = calls.iter().filter_map(|c| match c {
        Call::Multiply(gemm, ..) => Some(gemm.clone()),
        _ => None,
    });
    let kernels = calls.iter().filter_map(|c| match c {
        Call::Launch(name, ..) => Some(name.clone()),
        _ => None,
    });
    (gemms.collect(), kernels.collect())
}

/// The generated kernels that candidates launch: their symbols, with their last operation.
fn generated_by_candidates(plan: &Plan) -> BTreeMap<&str, String> {
    let mut all = BTreeMap::new();
    for kernel in &plan.kernels {
        let Entry::Launches(selected) = &kernel.entry else { continue };
        for launch in selected.every_launch() {
            let Launch::Generated(launch) = launch else { continue };
            let kernel = &plan.kernels[launch.kernel];
            let last = kernel.body.nodes().next_back().expect("a body").1.op.name().to_string();
            all.extend(kernel.entry.symbols().into_iter().map(|symbol| (symbol, last.clone())));
        }
    }
    all
}

#[test]
fn gelu_and_gradients_of_biases_are_epilogues_of_gemms() {
    let (_planned, dir) = planned("gpt2", 1, &["precision.compute=bf16"]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let (gemms, kernels) = work_of_step(&mut device, plan);
    let count = |epilogue: &str| {
        gemms.iter().filter(|p| p.contains(&format!("{epilogue} algorithm"))).count()
    };
    // Two layers: c_fc forward and backward, and the biases of c_fc and c_attn. The sums of c_proj are of f32.
    assert_eq!(count(" gelu_aux_bias"), 2, "{gemms:?}");
    assert_eq!(count(" dgelu"), 2, "{gemms:?}");
    assert_eq!(count(" bgrad b"), 4, "{gemms:?}");
    let gelus = kernels.iter().filter(|k| k.contains("gelu"));
    assert_eq!(gelus.count(), 0, "{kernels:?}");
}

#[test]
fn a_library_without_an_epilogue_is_given_plain_gemms_and_kernels() {
    let (planned, dir) = planned("gpt2", 1, &["precision.compute=bf16"]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let (with, _) = work_of_step(&mut device, plan);
    std::fs::remove_file(planned.path().join("tuning.json")).unwrap();

    let old = || {
        let mut driver = Recording::new((9, 0));
        driver.plain_gemms = true;
        driver
    };
    let mut device = open(&dir, old()).unwrap();
    let (gemms, kernels) = work_of_step(&mut device, plan);
    assert_eq!(gemms.len(), with.len());
    for name in [" bias", " gelu_aux_bias", " dgelu", " bgrad b"] {
        assert!(!gemms.iter().any(|p| p.contains(name)), "{gemms:?}");
    }
    let unfused = generated_by_candidates(plan);
    let count = |op: &str| {
        let is = |k: &&String| unfused.get(k.as_str()).is_some_and(|main| main == op);
        kernels.iter().filter(is).count()
    };
    assert_eq!([count("gelu_tanh"), count("gelu_tanh_grad")], [2, 2], "{kernels:?}");
    // Two layers: the matmuls but c_fc add a bias; c_attn and c_fc sum the gradient of theirs.
    assert_eq!([count("add"), count("sum_to")], [6, 4], "{kernels:?}");
    // The choice, that there is none, is kept, too.
    let device = open(&dir, old()).unwrap();
    let measured = device.driver().take();
    assert!(!measured.iter().any(|c| matches!(c, Call::Multiply(..))));
}

/// The blocks of a grid-stride loop are no more than four rounds of what the GPU holds.
#[test]
fn grids_are_sized_by_the_gpu() {
    let (_planned, dir) = planned("mlp", 1, &[]);
    let grids = |multiprocessors: u32| {
        let mut driver = Recording::new((9, 0));
        driver.properties.multiprocessors = multiprocessors;
        let mut device = open(&dir, driver).unwrap();
        let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
        let grid = |call: Call| match call {
            Call::Launch(name, shape, ..) => Some((name, shape.grid[0])),
            _ => None,
        };
        calls.into_iter().filter_map(grid).collect::<Vec<_>>()
    };
    let launches = dir.plan.kernels.iter().flat_map(|kernel| match &kernel.entry {
        Entry::Cuda { launches, .. } => launches.as_slice(),
        _ => &[],
    });
    let loops: BTreeMap<&str, u32> =
        launches.filter(|l| l.grid_stride).map(|l| (l.symbol.as_str(), l.grid[0])).collect();
    assert!(loops.values().any(|blocks| *blocks > 32));
    for ((name, large), (_, small)) in grids(132).into_iter().zip(grids(1)) {
        match loops.get(name.as_str()) {
            Some(all) => assert_eq!((large, small), (*all, 32.min(*all)), "{name}"),
            None => assert_eq!(large, small, "{name}"),
        }
    }
}

#[test]
fn gemms_of_fp8_multiply_8_bit_floats_with_their_scales() {
    let settings = ["precision.compute=fp8", "target.device=cuda", "target.arch=sm_90"];
    let planned = plan("tests/models/gpt2/model.onnx", 4, &settings);
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let calls = step(&mut device, plan, plan.tasks.next_key());
    let gemms: Vec<_> = calls
        .iter()
        .filter_map(|c| match c {
            Call::Multiply(gemm, at, _) => Some((gemm, at)),
            _ => None,
        })
        .collect();
    let (rounded, others): (Vec<_>, Vec<_>) =
        gemms.into_iter().partition(|(gemm, _)| gemm.contains(" a:f8"));
    assert!(rounded.iter().all(|(_, at)| at.scales.iter().all(|scale| *scale != 0)));
    assert!(others.iter().all(|(_, at)| at.scales == [0; 2]));
    // Two layers of four matmuls, each with two for its gradients; the head's 257 rows are not a multiple of 16.
    assert_eq!((rounded.len(), others.len()), (24, 3));
    let gradients = rounded.iter().filter(|(gemm, _)| gemm.contains("f8e5m2"));
    assert_eq!(gradients.count(), 16);
    let kernels =
        |name: &str| calls.iter().filter(|c| matches!(c, Call::Launch(n, ..) if n == name)).count();
    let quantized = kernels("quantize") + kernels("quantize_transposed");
    assert_eq!([kernels("magnitude"), quantized], [48, 48]);
    // A GEMM in a library without its epilogue still reads 8-bit floats.
    drop(device);
    std::fs::remove_file(planned.path().join("tuning.json")).unwrap();
    let mut old = Recording::new((9, 0));
    old.plain_gemms = true;
    let mut device = open(&dir, old).unwrap();
    let (gemms, _) = work_of_step(&mut device, plan);
    assert_eq!(gemms.iter().filter(|p| p.contains(" a:f8")).count(), 24);
}

#[test]
fn an_epilogue_that_is_slower_than_its_fallback_is_not_taken() {
    let (planned, dir) = planned("gpt2", 1, &["precision.compute=bf16"]);
    let slow = || {
        let mut driver = Recording::new((9, 0));
        driver.durations = vec![("gelu_aux", 50.0)];
        driver
    };
    let mut device = open(&dir, slow()).unwrap();
    let (gemms, kernels) = work_of_step(&mut device, &dir.plan);
    let with = |epilogue: &str| gemms.iter().filter(|p| p.contains(epilogue)).count();
    assert_eq!([with(" gelu_aux"), with(" dgelu"), with(" bgrad b")], [0, 2, 4], "{gemms:?}");
    let unfused = generated_by_candidates(&dir.plan);
    let gelus =
        kernels.iter().filter(|k| unfused.get(k.as_str()).is_some_and(|op| op == "gelu_tanh"));
    assert_eq!(gelus.count(), 2);
    // The times of both are kept, and the choice with them.
    let text = std::fs::read_to_string(planned.path().join("tuning.json")).unwrap();
    let tuning: serde_json::Value = serde_json::from_str(&text).unwrap();
    let all = tuning.as_object().unwrap().values().next().unwrap().as_object().unwrap();
    let mut compared = 0;
    for (key, measured) in all {
        let names = measured["candidates"].as_array().unwrap().iter().map(|t| &t["candidate"]);
        let Some((_, gemm)) = key.split_once("cublaslt or unfused: ") else {
            assert!(names.clone().all(|name| name == "cublaslt"), "{key}: {measured}");
            continue;
        };
        assert!(["gelu", "bias", "bgrad"].iter().any(|e| gemm.contains(e)), "{key}");
        assert!(names.eq(["cublaslt", "unfused"]), "{key}: {measured}");
        let slow = gemm.contains("gelu_aux");
        let chosen = if slow { "unfused" } else { "cublaslt" };
        assert_eq!(measured["chosen"]["candidate"], chosen, "{key}: {measured}");
        compared += 1;
    }
    assert!(compared > 3, "{text}");
    drop(device);
    let device = open(&dir, slow()).unwrap();
    let measured = |call: &Call| matches!(call, Call::Multiply(..) | Call::BeginCapture(_));
    assert!(!device.driver().take().iter().any(measured), "nothing is measured again");
}

#[test]
fn algorithms_are_measured_once_and_kept_beside_the_plan() {
    let (planned, dir) = planned("mlp", 1, &[]);
    let measured = |device: &Cuda<'_, Recording>| {
        device.driver().take().iter().filter(|c| matches!(c, Call::Multiply(..))).count()
    };
    let device = open(&dir, Recording::new((9, 0))).unwrap();
    assert!(measured(&device) > 0);
    let path = planned.path().join("tuning.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("recording sm_90"), "{text}");
    let device = open(&dir, Recording::new((9, 0))).unwrap();
    assert_eq!(measured(&device), 0, "the choice is kept");
    let device = open(&dir, Recording::new((8, 0))).unwrap();
    assert!(measured(&device) > 0, "for another GPU it is made again");
    std::fs::write(&path, &text[..text.len() / 2]).unwrap();
    let device = open(&dir, Recording::new((9, 0))).unwrap();
    assert!(measured(&device) > 0, "a torn file is as none");
}

#[test]
fn cuda_sources_are_compiled_once_and_kept_beside_the_plan() {
    let (planned, dir) = planned("gpt2", 1, &["precision.compute=bf16"]);
    let loaded = || {
        let device = open(&dir, Recording::new((9, 0))).unwrap();
        let (mut compiled, mut modules) = (Vec::new(), 0);
        for call in device.driver().take() {
            match call {
                Call::Compile(unit) => compiled.push(unit),
                Call::Load(_) => modules += 1,
                _ => {}
            }
        }
        (compiled, modules)
    };
    let (compiled, modules) = loaded();
    let units: BTreeSet<&String> = compiled.iter().collect();
    assert!(compiled.len() > 3 && units.len() == compiled.len(), "each once: {compiled:?}");
    assert_eq!(modules, compiled.len() + 1, "and the plan's own kernels");
    let files = std::fs::read_dir(planned.path().join("cubins")).unwrap().count();
    assert_eq!(files, compiled.len());
    assert_eq!(loaded(), (vec![], modules), "the second start compiles nothing");
}

#[test]
fn a_read_sees_what_was_fed() {
    let (_planned, dir) = planned("mlp", 1, &[]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    for input in &plan.inputs {
        let element = Element::from(input.ty.dtype);
        device.feed(input.buffer, element, &vec![0; input.ty.bytes()]).unwrap();
    }
    device.driver().take();
    let input = &plan.inputs[0];
    device.read(input.buffer, 0, input.ty.bytes()).unwrap();
    let calls = device.driver().take();
    let read = calls.iter().position(|c| matches!(c, Call::CopyOut(..))).expect("a copy out");
    let Call::CopyOut(from, ..) = calls[read] else { unreachable!() };
    let delivered = |c: &Call| matches!(c, Call::Copy(to, ..) if *to == from);
    assert!(calls[..read].iter().any(delivered), "{calls:?}");
    // What was delivered is not delivered again.
    device.run(TaskId::FIRST..TaskId::FIRST.next()).unwrap();
    assert!(!device.driver().take().iter().any(delivered));
}

#[test]
fn what_a_plan_uses_is_counted() {
    let (_planned, dir) = planned("gpt2", 1, &["run.accumulation=3"]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    let usage = device.usage().unwrap();
    let ranges: Vec<_> = (0..3).map(|k| plan.micro_step_tasks(k, 3)).collect();
    let mut calls = Vec::new();
    for range in ranges {
        device.driver().take();
        device.run(range.clone()).unwrap();
        // A range that ran before is captured; its calls are the same.
        calls.extend(device.driver().take());
    }
    let count = |is: fn(&Call) -> bool| calls.iter().filter(|c| is(c)).count();
    assert_eq!(usage.launches["kernel"], count(|c| matches!(c, Call::Launch(..))));
    assert_eq!(usage.launches["gemm"], count(|c| matches!(c, Call::Multiply(..))));
    assert_eq!(usage.graph_launches, Some(3));
    let arenas = plan.persistent_bytes + plan.workspace_bytes;
    assert_eq!(usage.device_bytes, Some(arenas + usage.extra_bytes));
    assert!(usage.extra_bytes >= 32 << 20, "the workspace of gemms is counted");
    assert_eq!(extra_bytes(plan).unwrap(), usage.extra_bytes, "and known without a device");
}

#[test]
fn what_a_gpu_cannot_do_is_one_clear_error() {
    let (_planned, dir) = planned("mlp", 1, &[]);
    let error = |driver: Recording| open(&dir, driver).err().expect("refused").to_string();
    let mut small = Recording::new((9, 0));
    small.memory_bytes = 1000;
    let text = error(small);
    for part in ["out of GPU memory", "persistent", "workspace", "1000 of 1000 are free", "--bind"]
    {
        assert!(text.contains(part), "{text}");
    }
    let mut broken = Recording::new((9, 0));
    broken.broken_module = Some("kernels.ptx");
    let text = error(broken);
    assert!(text.contains("kernels/kernels.ptx cannot be loaded: device kernel image is invalid"));
    let text = error(Recording::new((7, 5)));
    assert!(text.contains("the plan is for sm_80") && text.contains("sm_75"), "{text}");
}

#[test]
fn a_rank_that_waits_for_one_that_is_gone_stops_and_says_where() {
    let (_planned, dir) = planned("mlp", 2, &[]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    step(&mut device, plan, plan.tasks.next_key());
    device.note_metrics().unwrap();
    device.driver().stuck.set(true);
    *device.driver().peer_error.borrow_mut() = Some("remote process exited".into());
    let error = device.take_metrics().expect_err("the other rank is gone").to_string();
    let first = plan.tasks.iter().find(|t| t.action.is_collective()).unwrap();
    for part in ["rank 0 stopped", &first.name, "remote process exited"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(device.driver().take().contains(&Call::Abort), "its collectives are ended");
}

#[test]
fn a_traced_step_times_every_task() {
    let (_planned, dir) = planned("mlp", 1, &[]);
    let plan = &dir.plan;
    let mut device = open(&dir, Recording::new((9, 0))).unwrap();
    device.driver().take();
    let spans = device.trace(TaskId::FIRST..plan.tasks.next_key()).unwrap();
    assert!(spans.iter().map(|s| s.task).eq(plan.tasks.keys()));
    assert!(spans.iter().all(|s| s.duration_us > 0.0 && s.start_us > 0.0));
    assert!(device.driver().take().iter().all(|c| !matches!(c, Call::BeginCapture(_))));
}

#[test]
fn without_a_driver_a_plan_for_gpus_is_refused_by_name() {
    let findings = doctor::examine(None).unwrap();
    if findings.findings[0].found.is_some() {
        eprintln!("SKIPPED: this machine has a driver");
        return;
    }
    let (planned, dir) = planned("mlp", 1, &[]);
    let lacking = doctor::examine(Some(&dir.plan)).unwrap();
    assert!(lacking.lacking() && lacking.memory_bytes.is_some());
    let options = frit_runtime::run::RunOptions {
        steps: 1,
        data: file("tests/models/mlp/data.safetensors").into(),
        ..Default::default()
    };
    let error = frit_runtime::run::run(&planned.path(), &options).unwrap_err().to_string();
    for part in ["the NVIDIA driver is not found", "libcuda.so.1", "target.device"] {
        assert!(error.contains(part), "{error}");
    }
}
