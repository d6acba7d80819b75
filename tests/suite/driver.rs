//! Plans on the real driver implementation, over stand-ins of NVIDIA's libraries that check every call and compute
//! every kernel: training equals that on the CPU, in every order of execution that the device may choose.

use crate::stand_ins::{Ended, FOLDER, Gpu, Started};
use crate::support::{Planned, file, plan, plan_to_evaluate, train};
use frit::plan_dir::Stored;
use frit_ir::plan::{Entry, Launch};
use frit_passes::verify_plan::verify_plan;
use frit_tests::requirements::Requirement;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: usize = 4;
const STEPS_TEXT: &str = "4";
const CUDA: [&str; 2] = ["target.device=cuda", "target.arch=sm_90"];

/// A given model and its data, or the one with the operations that these do not have.
fn files_of(model: &str) -> [String; 2] {
    match model {
        "operations" => {
            ["examples/gpu/operations.json", "examples/char_gpt2/data.bin"].map(String::from)
        }
        _ => ["model.onnx", "data.safetensors"].map(|f| format!("tests/models/{model}/{f}")),
    }
}

fn on_gpu(model: &str, settings: &[&str]) -> Planned {
    plan(&files_of(model)[0], 4, &[&CUDA, settings].concat())
}

fn data_of(model: &str) -> String {
    file(&files_of(model)[1]).display().to_string()
}

/// The numbers of a step, by name.
type Metrics = BTreeMap<String, f64>;

fn metrics(path: &Path) -> Vec<Metrics> {
    let text = std::fs::read_to_string(path).expect("metrics");
    let line = |line: &str| {
        let values: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(line).expect("an object");
        values.into_iter().filter_map(|(k, v)| Some((k, v.as_f64()?))).collect()
    };
    text.lines().map(line).collect()
}

/// f32 tensors by name.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).expect("tensors");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let values = |data: &[u8]| {
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
    };
    all.tensors().into_iter().map(|(name, view)| (name, values(view.data()))).collect()
}

/// Largest difference of two tensors over the largest magnitude.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let most = b.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
    let far = |(x, y): (&f32, &f32)| if (x - y).is_nan() { f32::INFINITY } else { (x - y).abs() };
    a.iter().zip(b).map(far).fold(0.0, f32::max) / most
}

/// Trains on the CPU and on a GPU like an H100; losses and the first step's gradients are close.
fn check(model: &str, settings: &[&str], ranks: usize, tolerance: f64) -> Vec<Ended> {
    check_on(&Gpu::new(), model, settings, ranks, tolerance)
}

fn check_on(gpu: &Gpu, model: &str, settings: &[&str], ranks: usize, tolerance: f64) -> Vec<Ended> {
    let count = format!("sharding.ranks={ranks}");
    let settings = [settings, &[&count]].concat();
    check_plan(gpu, model, &on_gpu(model, &settings), &settings, tolerance)
}

/// The same of a plan that was compiled with these settings.
fn check_plan(
    gpu: &Gpu,
    model: &str,
    gpu_plan: &Planned,
    settings: &[&str],
    tolerance: f64,
) -> Vec<Ended> {
    let ranks = gpu_plan.compiled.plan.world_size;
    let [path, data] = files_of(model);
    let cpu_plan = plan(&path, 4, settings);
    let expected = train(&cpu_plan, &data, STEPS, false);

    let place = |name: &str| gpu.dir.path().join(name);
    let (lines, grads) = (place("metrics.jsonl"), place("grads.safetensors"));
    let (path, data) = (gpu_plan.path(), data_of(model));
    let text = |path: &Path| path.to_str().expect("a path in Unicode").to_string();
    let arguments = [
        "run",
        &text(&path),
        "--data",
        &data,
        "--steps",
        STEPS_TEXT,
        "--metrics",
        &text(&lines),
        "--dump-grads",
        &text(&grads),
    ];
    let ended = match ranks {
        1 => vec![gpu.run(&arguments)],
        _ => gpu.run_ranks(&arguments, ranks, &[]),
    };
    ended.iter().for_each(Ended::expect_success);
    let found = metrics(&lines);
    assert_eq!(found.len(), STEPS);
    for (step, line) in found.iter().enumerate() {
        for (name, expected) in [("loss", &expected.losses), ("grad_norm", &expected.grad_norms)] {
            let (found, expected) = (line[name], expected[step]);
            let bar = if name == "loss" { tolerance } else { 10.0 * tolerance };
            assert!(
                (found - expected).abs() <= bar * expected.abs(),
                "{name} of step {step}: {found} on the GPU, {expected} on the CPU"
            );
        }
    }
    let expected = tensors(&cpu_plan.dir.path().join("grads.safetensors"));
    let found = tensors(&grads);
    assert!(!found.is_empty() && found.keys().eq(expected.keys()));
    for (name, gradient) in &found {
        let far = f64::from(distance(gradient, &expected[name]));
        assert!(far <= 100.0 * tolerance, "gradient of `{name}`: {far}");
    }
    ended
}

/// A base that is held in 16 bits is read, gathered and offloaded as it is held.
#[test]
fn what_is_frozen_is_held_in_what_it_is_read_in() {
    let frozen = "params.trainable=[\"**.h.1.**\"]";
    for (ranks, more) in [(1, "memory.offload=parameters"), (2, "run.accumulation=2")] {
        let settings = ["precision.compute=bf16", frozen, more];
        let plan = on_gpu("gpt2", &settings).compiled.plan;
        assert!(plan.groups.iter().any(|g| g.dtype == frit_ir::DType::BF16));
        check("gpt2", &settings, ranks, 2e-4);
    }
}

/// The first step is put on the streams task by task, in two parts, as its gradients are written. Then each part
/// of a step is put there once more, and becomes a graph. Rank 0 measures candidates in pairs, each from a graph.
fn expect_graphs(ended: &[Ended], parts: u64) {
    const RUNS: u64 = 6;
    for (i, rank) in ended.iter().enumerate() {
        let measured = rank.count("call cuStreamBeginCapture_v2") - parts;
        assert!(measured.is_multiple_of(2) && (i == 0 || measured == 0), "{measured} on rank {i}");
        let launched = rank.count("call cuGraphLaunch");
        assert_eq!(launched, parts * (STEPS as u64 - 2) + RUNS * measured);
    }
}

#[test]
fn mlp_trains_as_on_the_cpu() {
    expect_graphs(&check("mlp", &["precision.compute=fp32"], 1, 1e-5), 1);
}

/// Its optimizer's kernels have more tiles than four rounds of the blocks that one multiprocessor holds.
#[test]
fn blocks_take_turns_on_a_small_gpu() {
    let gpu = Gpu::new().with("FRIT_DEVICE_MULTIPROCESSORS", 1);
    check_on(&gpu, "mlp", &["precision.compute=fp32"], 1, 1e-5);
}

#[test]
fn gpt2_trains_as_on_the_cpu() {
    let ended = check("gpt2", &["precision.compute=bf16"], 1, 2e-4);
    expect_graphs(&ended, 1);
}

/// A launch without a choice: the first candidate that needs no cuDNN, or the last.
fn settled(launch: Launch, last: bool) -> Vec<Launch> {
    let Launch::Choice(mut candidates) = launch else { return vec![launch] };
    candidates.retain(|c| !c.launches.iter().any(|l| matches!(l, Launch::Operation(_))));
    let chosen = candidates.swap_remove(if last { candidates.len() - 1 } else { 0 });
    chosen.launches.into_iter().flat_map(|launch| settled(launch, last)).collect()
}

/// A GEMM with its epilogue, and a plain GEMM with generated kernels behind, train alike.
#[test]
fn gpt2_trains_as_on_the_cpu_whichever_candidates_run() {
    for (precision, tolerance) in [("bf16", 2e-4), ("fp32", 1e-5)] {
        let precision = format!("precision.compute={precision}");
        for last in [false, true] {
            let mut planned = on_gpu("gpt2", &[&precision]);
            let mut n_generated = 0;
            for kernel in &mut planned.compiled.plan.kernels {
                let Entry::Launches(selected) = &mut kernel.entry else { continue };
                selected.scratch_bytes = selected.most_scratch_bytes();
                let launches = std::mem::take(&mut selected.launches);
                selected.launches = launches.into_iter().flat_map(|l| settled(l, last)).collect();
                n_generated += usize::from(selected.launches_generated());
                kernel.bind();
            }
            assert_eq!(n_generated > 4, last, "{n_generated}");
            let plan = &planned.compiled.plan;
            verify_plan(plan).unwrap_or_else(|found| panic!("{found:?}"));
            std::fs::remove_dir_all(planned.path()).expect("removed");
            frit::plan_dir::write(&planned.path(), &planned.compiled, Stored::Copy)
                .unwrap_or_else(|e| panic!("{e}"));
            check_plan(&Gpu::new(), "gpt2", &planned, &[&precision], tolerance);
        }
    }
}

#[test]
fn logits_in_chunks_train_as_on_the_cpu() {
    for (precision, ranks, tolerance) in [("bf16", 1, 2e-4), ("fp32", 2, 1e-5)] {
        let precision = format!("precision.compute={precision}");
        check("gpt2", &[&precision, "memory.loss_chunks=3"], ranks, tolerance);
    }
}

#[test]
fn llama_trains_as_on_the_cpu() {
    check("llama", &["precision.compute=bf16"], 1, 2e-4);
}

/// What Muon orthogonalizes is gathered from the ranks; AdamW steps the rest in a launch of its own.
#[test]
fn muon_trains_as_on_the_cpu() {
    for ranks in [1, 2] {
        check("mlp", &["precision.compute=fp32", "optimizer.kind=muon"], ranks, 1e-4);
    }
    check("gpt2", &["precision.compute=bf16", "optimizer.kind=muon"], 2, 2e-4);
}

#[test]
fn resnet_trains_as_on_the_cpu() {
    check("resnet", &["precision.compute=fp32"], 1, 1e-3);
    check("resnet", &["precision.compute=fp32", "memory.recompute=selective"], 1, 1e-3);
    let synchronized = ["precision.compute=fp32", "model.batch_norm=sync"];
    check("resnet", &synchronized, 2, 1e-3);
    // Rounding alone changes a step of so few examples by percents.
    check("resnet", &["precision.compute=fp16"], 1, 2e-2);
}

#[test]
fn every_other_operation_trains_as_on_the_cpu() {
    check("operations", &["precision.compute=fp32"], 1, 1e-4);
}

#[test]
fn models_that_draw_train_as_on_the_cpu() {
    let own_loss = ["loss.kind=output", "loss.logits=loss"];
    for (model, precision, ranks, tolerance) in [
        ("vae", "precision.compute=fp32", 1, 1e-5),
        ("diffusion", "precision.compute=fp32", 2, 1e-5),
        ("diffusion", "precision.compute=bf16", 1, 2e-3),
    ] {
        check(model, &[&own_loss[..], &[precision]].concat(), ranks, tolerance);
    }
}

#[test]
fn gpt2_in_fp8_trains_as_on_the_cpu() {
    // Of 8-bit floats a rounding that goes the other way is an error of 6 %.
    check("gpt2", &["precision.compute=fp8"], 1, 3e-3);
}

#[test]
fn copies_from_and_to_the_host_train_as_on_the_cpu() {
    let ended = check("gpt2", &["precision.compute=fp32", "memory.offload=optimizer"], 1, 1e-5);
    expect_graphs(&ended, 1);
}

#[test]
fn two_ranks_train_as_on_the_cpu() {
    let ended = check("gpt2", &["precision.compute=bf16"], 2, 2e-4);
    expect_graphs(&ended, 1);
    // Collectives and what belongs to them keep their priority in graphs.
    assert!(ended.iter().all(|e| e.count("node of priority -5") > 0));
    // They are launched while the host waits for that, while a step is captured, too.
    assert!(ended.iter().all(|e| e.count("nccl launch by another thread") > 0));
}

#[test]
fn communicators_that_block_train_as_on_the_cpu() {
    let teams =
        ["precision.compute=fp32", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    for (variable, value) in [("NCCL_COMM_BLOCKING", "1"), ("FRIT_NCCL_REFUSES", "config")] {
        let gpu = Gpu::new().with(variable, value);
        for rank in check_on(&gpu, "mlp", &teams, 4, 1e-5) {
            assert!(rank.count("nccl launch by the caller") > 0, "{variable}");
            assert_eq!(rank.count("nccl launch by another thread"), 0, "{variable}");
        }
    }
}

#[test]
fn four_ranks_in_teams_train_as_on_the_cpu() {
    let more =
        ["precision.compute=fp32", "sharding.strategy=hybrid_shard", "sharding.shard_group=2"];
    check("mlp", &more, 4, 1e-5);
}

#[test]
fn accumulation_trains_as_on_the_cpu() {
    check("mlp", &["precision.compute=fp32", "run.accumulation=2"], 2, 1e-5);
}

/// A plan on the GPU, with what processes are given of it.
struct Case {
    planned: Planned,
    data: String,
}

impl Case {
    fn new(model: &str, settings: &[&str]) -> Case {
        Case { planned: on_gpu(model, settings), data: data_of(model) }
    }

    /// `COMMAND plan --data data` and more.
    fn arguments(&self, command: &str, more: &[&str]) -> Vec<String> {
        let path = self.planned.path().display().to_string();
        let first = [command, &path, "--data", &self.data].map(String::from);
        first.into_iter().chain(more.iter().map(|m| m.to_string())).collect()
    }
}

fn run(gpu: &Gpu, arguments: &[String]) -> Ended {
    gpu.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn every_kernel_agrees_with_the_interpreter_launched_and_in_graphs() {
    for (model, settings) in [
        ("gpt2", &["precision.compute=bf16", "memory.offload=optimizer"][..]),
        ("gpt2", &["precision.compute=fp8"]),
        ("resnet", &["precision.compute=bf16"]),
        ("operations", &["precision.compute=bf16"]),
    ] {
        let case = Case::new(model, settings);
        // In the second step each task is a graph of its own.
        let ended = run(&Gpu::new(), &case.arguments("compare", &["--steps", "2"]));
        ended.expect_success();
        assert!(ended.count("call cuGraphLaunch") > 0);
    }
}

#[test]
fn the_order_of_the_device_changes_nothing() {
    let case = Case::new("mlp", &["precision.compute=bf16", "sharding.ranks=2"]);
    let numbers: Vec<Vec<Vec<f64>>> = ["1", "2", "3"]
        .iter()
        .map(|seed| {
            let gpu = Gpu::new();
            let lines = gpu.dir.path().join("metrics.jsonl");
            let arguments = case.arguments(
                "run",
                &["--steps", "6", "--metrics", lines.to_str().expect("a path in Unicode")],
            );
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let seeds = [(0, "FRIT_DEVICE_SEED", *seed), (1, "FRIT_DEVICE_SEED", "9")];
            gpu.run_ranks(&arguments, 2, &seeds).iter().for_each(Ended::expect_success);
            metrics(&lines).iter().map(|m| vec![m["loss"], m["grad_norm"]]).collect()
        })
        .collect();
    assert_eq!(numbers[0].len(), 6);
    assert!(numbers.iter().all(|n| *n == numbers[0]), "{numbers:?}");
}

#[test]
fn a_traced_step_times_every_task() {
    let case = Case::new("gpt2", &["precision.compute=bf16", "memory.offload=optimizer"]);
    let gpu = Gpu::new();
    let trace = gpu.dir.path().join("trace.json");
    let more = ["--steps", "3", "--trace", trace.to_str().expect("a path in Unicode")];
    run(&gpu, &case.arguments("run", &more)).expect_success();
    let text = std::fs::read(&trace).expect("a trace");
    let trace: serde_json::Value = serde_json::from_slice(&text).expect("an object");
    let events = trace["traceEvents"].as_array().expect("events");
    let timed = events.iter().filter(|e| e["dur"].as_f64().is_some_and(|us| us >= 0.0)).count();
    assert!(timed >= case.planned.compiled.plan.tasks.len(), "{timed}");
}

#[test]
fn a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended() {
    let settings = [&CUDA[..], &["precision.compute=bf16", "sharding.ranks=2"]].concat();
    let planned = plan_to_evaluate("tests/models/mlp/model.onnx", 4, &settings);
    let case = Case { planned, data: data_of("mlp") };
    let gpu = Gpu::new();
    let place = |name: &str| gpu.dir.path().join(name).display().to_string();
    let ranks = |more: &[&str]| {
        let arguments = case.arguments("run", more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        gpu.run_ranks(&arguments, 2, &[]).iter().for_each(Ended::expect_success);
    };
    let (whole, parts, checkpoint) = (place("whole"), place("parts"), place("checkpoint"));
    let validation = ["--validation", &case.data, "--validate-every", "2"];
    ranks(&[&["--steps", "6", "--save", &whole][..], &validation].concat());
    ranks(&[&["--steps", "4", "--checkpoint", &checkpoint][..], &validation].concat());
    ranks(&["--steps", "6", "--checkpoint", &checkpoint, "--resume", "--save", &parts]);
    let (whole, parts) = (tensors(Path::new(&whole)), tensors(Path::new(&parts)));
    assert!(!whole.is_empty() && whole == parts);
}

#[test]
fn what_goes_wrong_is_one_clear_error() {
    let case = Case::new("mlp", &["precision.compute=fp32"]);
    let arguments = case.arguments("run", &["--steps", "4"]);
    let fail = "FRIT_DEVICE_FAIL";
    for (name, value, parts) in [
        ("FRIT_DEVICE_CAPABILITY", "0", &["no CUDA-capable device is detected"][..]),
        ("FRIT_DEVICE_CAPABILITY", "80", &["sm_90", "target.arch"]),
        ("FRIT_DEVICE_VERSION", "11080", &["supports CUDA 11.8", "driver 525"]),
        ("FRIT_DEVICE_MEMORY", "100000", &["out of GPU memory", "--bind batch"]),
        ("LOCAL_RANK", "1", &["no GPU 1", "the driver sees 1"]),
        (
            fail,
            "cuModuleLoadDataEx 1 218",
            &["kernels.ptx cannot be loaded", "a PTX JIT compilation failed"],
        ),
        (fail, "cuModuleGetFunction 1 500", &["error 500"]),
        (fail, "cuMemHostAlloc 1 2", &["cuMemHostAlloc", "out of memory"]),
        // Kernels: while everything is made ready, in the first step, in a graph.
        (fail, "kernel 1 700", &["a kernel launched before failed: an illegal memory access"]),
        (fail, "kernel 20 716", &["a kernel launched before failed: misaligned address"]),
        (fail, "cuGraphLaunch 2 700", &["an illegal memory access"]),
        (fail, "cuStreamEndCapture 1 901", &["cuStreamEndCapture", "during capture"]),
        (fail, "cuGraphInstantiateWithFlags 1 2", &["cuGraphInstantiate", "out of memory"]),
    ] {
        let gpu = Gpu::new().with(name, value).with("WORLD_SIZE", 1).with("RANK", 0);
        let gpu = if name == "LOCAL_RANK" { gpu } else { gpu.with("LOCAL_RANK", 0) };
        let ended = run(&gpu, &arguments);
        assert_eq!(ended.code, Some(2), "{name}={value}: {}", ended.said);
        let errors = ended.said.lines().filter(|l| l.starts_with("error: ")).count();
        assert_eq!(errors, 1, "{name}={value}: {}", ended.said);
        assert!(!ended.said.contains("panicked"), "{name}={value}: {}", ended.said);
        for part in parts {
            assert!(ended.said.contains(part), "{name}={value}: `{part}` is not in {}", ended.said);
        }
    }
}

/// Code that NVIDIA's compiler made is not run here; what a launch may ask of the device is in its file.
#[test]
fn code_of_nvrtc_is_launched_within_its_limits() {
    let Some(nvrtc) = Requirement::Nvrtc.find() else { return };
    let major: u32 = nvrtc.extension().and_then(|e| e.to_str()?.parse().ok()).expect("a version");
    let folders = [nvrtc.parent().expect("a folder"), FOLDER.as_path()];
    let folders = std::env::join_paths(folders).expect("paths").into_string().expect("Unicode");
    for model in ["gpt2", "resnet"] {
        let case = Case::new(model, &["precision.compute=bf16"]);
        let gpu =
            Gpu::new().with("LD_LIBRARY_PATH", &folders).with("FRIT_DEVICE_VERSION", major * 1000);
        let ended = run(&gpu, &case.arguments("run", &["--steps", "3"]));
        // Losses and gradients are what lay in memory: a run that ends because they are no numbers has launched all the same.
        let is_no_number =
            ["is NaN", "gradients are not finite"].map(|what| ended.said.contains(what));
        assert!(ended.code == Some(0) || is_no_number.contains(&true), "{}", ended.said);
        ended.expect_legal();
        assert!(ended.count("call cuModuleLoadDataEx") > 1);
    }
}

#[test]
fn a_process_that_is_shown_one_gpu_takes_it() {
    let case = Case::new("mlp", &["precision.compute=fp32"]);
    let gpu = Gpu::new().with("LOCAL_RANK", 1).with("RANK", 0).with("WORLD_SIZE", 1);
    let arguments = case.arguments("run", &["--steps", "1"]);
    run(&gpu.with("CUDA_VISIBLE_DEVICES", 3), &arguments).expect_success();
}

#[test]
fn a_rank_whose_kernel_fails_ends_the_others_that_wait_for_it() {
    let case = Case::new("mlp", &["precision.compute=fp32", "sharding.ranks=2"]);
    let arguments = case.arguments("run", &["--steps", "6"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // While everything is made ready or in the first step, and in a graph.
    for failure in ["kernel 5 700", "kernel 25 700", "cuGraphLaunch 3 700"] {
        let gpu = Gpu::new().with("FRIT_TIMEOUT", 60);
        let ended = gpu.run_ranks(&arguments, 2, &[(1, "FRIT_DEVICE_FAIL", failure)]);
        for rank in &ended {
            assert_eq!(rank.code, Some(2), "{failure}: {}", rank.said);
        }
        assert!(ended[1].said.contains("an illegal memory access"), "{}", ended[1].said);
        assert!(ended[0].said.contains("rank 1 stopped"), "{}", ended[0].said);
        ended.iter().for_each(Ended::expect_legal);
    }
}

#[test]
fn a_killed_rank_ends_the_others() {
    let teams = [
        "precision.compute=fp32",
        "sharding.ranks=4",
        "sharding.strategy=hybrid_shard",
        "sharding.shard_group=2",
    ];
    for (settings, n, blocking) in [
        (&["precision.compute=fp32", "sharding.ranks=2"][..], 2, "0"),
        (&["precision.compute=fp32", "sharding.ranks=2"], 2, "1"),
        (&teams, 4, "0"),
    ] {
        let case = Case::new("mlp", settings);
        let gpu = Gpu::new().with("NCCL_COMM_BLOCKING", blocking);
        let lines = gpu.dir.path().join("metrics.jsonl");
        let path = lines.to_str().expect("a path in Unicode");
        let arguments = case.arguments("run", &["--steps", "1000000", "--metrics", path]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut ranks = gpu.start_ranks(&arguments, n, &[]);
        // Steps are graphs by then.
        while std::fs::read_to_string(&lines).unwrap_or_default().lines().count() < 5 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            assert!(ranks[0].child.try_wait().expect("a state").is_none(), "it has ended");
        }
        let mut last = ranks.pop().expect("several ranks");
        last.child.kill().expect("killed");
        for rank in ranks.into_iter().map(Started::wait) {
            assert_eq!(rank.code, Some(2), "{}", rank.said);
            assert!(rank.said.contains(&format!("rank {}", n - 1)), "{}", rank.said);
            rank.expect_legal();
        }
        last.wait();
    }
}
