//! Kernel selection: every body has code, generated or selected, and the runtime executes only what the plan lists.

use crate::support::{Planned, compile_at, file, plan, plan_at};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::plan_dir::Stored;
use frit_cuda::recording::{Call, Recording};
use frit_ir::plan::{Entry, Kernel, KernelKind, Launch, Plan};
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::run::{RunOptions, run};
use std::collections::BTreeSet;
use std::path::Path;

fn has_launches(model: &str, batch: usize, settings: &[&str]) {
    launches_of(&format!("tests/models/{model}/model.onnx"), batch, settings);
}

/// Compiles a model for CUDA and returns the files of CUDA C++ that its kernels use, and the operations that they do.
fn launches_of(model: &str, batch: usize, settings: &[&str]) -> [BTreeSet<String>; 2] {
    let settings = [&["target.device=cuda"], settings].concat();
    let compiled = compile_at(&file(model), batch, &settings);
    let (mut n_kernels, mut files, mut operations) = (0, BTreeSet::new(), BTreeSet::new());
    for kernel in &compiled.plan.kernels {
        assert_ne!(kernel.kind(), KernelKind::Interpreted, "{model}:\n{}", kernel.body);
        operations.extend(kernel.body.nodes().map(|(_, n)| n.op.name().to_string()));
        if let Entry::Launches(selected) = &kernel.entry {
            n_kernels += 1;
            files.extend(selected.every_launch().into_iter().filter_map(|l| match l {
                Launch::Source(kernel) => Some(kernel.file.to_string()),
                _ => None,
            }));
        }
    }
    assert!(n_kernels > 0, "{model}");
    // What a collective launches, the runtime adds.
    if compiled.plan.tasks.iter().any(|t| compiled.plan.rank_sum(&t.action).is_some()) {
        files.insert("rank_sum".into());
    }
    [files, operations]
}

#[test]
fn language_models_have_launches_for_every_library_kernel() {
    for model in ["mlp", "gpt2", "llama", "bert", "t5", "bloom", "opt", "moe_dispatch", "lstm"] {
        has_launches(model, 4, &["precision.compute=bf16"]);
    }
}

#[test]
fn vision_models_have_launches_for_every_library_kernel() {
    for model in ["vit", "resnet"] {
        has_launches(model, 4, &["precision.compute=fp16"]);
    }
    has_launches("unet", 4, &["precision.compute=fp32", "loss.kind=mse"]);
}

#[test]
fn models_that_draw_have_launches_for_every_library_kernel() {
    for model in ["vae", "diffusion"] {
        let settings = ["precision.compute=bf16", "loss.kind=output", "loss.logits=loss"];
        has_launches(model, 4, &settings);
    }
}

#[test]
fn the_models_that_are_timed_have_launches_for_every_library_kernel() {
    for (model, batch) in [
        ("gpt2_124m", 32),
        ("gpt2_774m", 16),
        ("gpt2_1558m", 8),
        ("bert_large", 32),
        ("resnet50", 256),
    ] {
        launches_of(&format!("examples/gpu/{model}.json"), batch, &["precision.compute=bf16"]);
    }
}

/// And their gradients, but that of the last one: it reads the gradient of the mean of an image, which is broadcast.
#[test]
fn relus_of_resnet_are_in_the_kernels_of_batch_normalizations() {
    // Images of 16 bits lie channels last.
    let layouts = [
        ("bf16", "bf16[4, 1, 1, 2048]", "batch_norm_last", "_grad"),
        ("fp32", "f32[4, 2048, 1, 1]", "batch_norm", "_relu_grad"),
    ];
    for (precision, gradient, kernels, last) in layouts {
        let precision = format!("precision.compute={precision}");
        let settings = ["target.device=cuda", &precision];
        let compiled = compile_at(&file("examples/gpu/resnet50.json"), 4, &settings);
        let (mut entries, mut alone) = (BTreeSet::new(), vec![]);
        for kernel in &compiled.plan.kernels {
            let has = |name| kernel.body.nodes().any(|(_, n)| n.op.name().starts_with(name));
            if has("relu") && !has("batch_norm") {
                alone.push(kernel.body.to_string());
            }
            let Entry::Launches(selected) = &kernel.entry else { continue };
            entries.extend(selected.every_launch().into_iter().filter_map(|l| match l {
                Launch::Source(kernel) => Some(kernel.entry.clone()),
                _ => None,
            }));
        }
        assert_eq!(alone.len(), 1, "{alone:#?}");
        assert!(alone[0].contains(gradient), "{alone:#?}");
        for entry in ["_relu", "_sum_relu", "_relu_grad_parts", "_sum_relu_grad_parts", last] {
            assert!(entries.contains(&format!("{kernels}{entry}")), "{entry}: {entries:?}");
        }
    }
}

#[test]
fn the_plans_that_are_checked_on_a_gpu_use_every_source_and_operation() {
    let (mut used, mut operations) = (BTreeSet::new(), BTreeSet::new());
    let mut add = |[files, done]: [BTreeSet<String>; 2]| {
        used.extend(files);
        operations.extend(done);
    };
    let given = [
        "mlp",
        "gpt2",
        "llama",
        "bert",
        "t5",
        "bloom",
        "moe_dispatch",
        "lstm",
        "vit",
        "resnet",
        "dropout",
    ];
    for model in given.map(|m| format!("tests/models/{m}/model.onnx")) {
        add(launches_of(&model, 4, &["precision.compute=bf16"]));
    }
    let unet = ["precision.compute=bf16", "loss.kind=mse"];
    add(launches_of("tests/models/unet/model.onnx", 4, &unet));
    let own_loss = ["precision.compute=bf16", "loss.kind=output", "loss.logits=loss"];
    add(launches_of("tests/models/diffusion/model.onnx", 4, &own_loss));
    let wide = ["precision.compute=fp32"];
    add(launches_of("tests/models/resnet/model.onnx", 4, &wide));
    let adafactor = ["optimizer.kind=adafactor"];
    add(launches_of("tests/models/gpt2/model.onnx", 4, &adafactor));
    add(launches_of("tests/models/gpt2/model.onnx", 4, &["optimizer.kind=muon"]));
    let reproducible = ["run.reproducible=4", "sharding.ranks=2", "precision.compute=fp32"];
    add(launches_of("tests/models/gpt2/model.onnx", 1, &reproducible));
    let fp8 = ["precision.compute=fp8", "target.arch=sm_90"];
    add(launches_of("tests/models/gpt2/model.onnx", 4, &fp8));
    for model in ["attention_heads", "operations"] {
        add(launches_of(&format!("examples/gpu/{model}.json"), 2, &wide));
    }
    let folder = std::fs::read_dir(file("kernels/library/cuda")).expect("the sources");
    let sources = folder
        .map(|f| f.expect("a file").path())
        .filter(|p| p.extension().is_some_and(|e| e == "cu"));
    let names = sources.filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned()));
    let unused: Vec<String> = names.filter(|name| !used.contains(name.as_str())).collect();
    // Converts only what cuBLASLt cannot write, such as a sum in f64 of f32; the emulation runs it.
    assert_eq!(unused, ["convert"]);
    let known = crate::coverage::operations();
    let missing: Vec<&String> = known.iter().filter(|name| !operations.contains(*name)).collect();
    assert!(
        missing.is_empty(),
        "in none of them, so add it to examples/gpu/make_models.py: {missing:?}"
    );
}

/// A model with the place of the largest of doubles, which the CPU has no kernel for.
const DOUBLES: &str = r#"{
  "frit_model": 1, "name": "doubles", "dims": {"batch": null},
  "inputs": [{"name": "x", "dtype": "f32", "shape": ["batch", 3]},
             {"name": "n", "dtype": "f64", "shape": ["batch", 4]}],
  "params": [{"name": "w", "shape": [3], "init": "ones"}],
  "nodes": [
    {"op": "arg_reduce", "scope": "vote", "inputs": ["n"], "outputs": ["winner"],
     "attrs": {"axis": 1, "largest": true, "last": false}},
    {"op": "cast", "inputs": ["winner"], "outputs": ["number"], "attrs": {"to": "f32"}},
    {"op": "reduce", "inputs": ["number"], "outputs": ["most"],
     "attrs": {"f": "mean", "axes": [0], "keep_dims": false}},
    {"op": "mul", "inputs": ["x", "w"], "outputs": ["xw"]},
    {"op": "reduce", "inputs": ["xw"], "outputs": ["mean"],
     "attrs": {"f": "mean", "axes": [0, 1], "keep_dims": false}},
    {"op": "add", "inputs": ["mean", "most"], "outputs": ["loss"]}
  ],
  "outputs": ["loss"]
}"#;

/// What a step of a plan for the CPU puts on it, by kind.
fn usage(planned: &Planned, dir: &Path, data: &Path) -> serde_json::Value {
    let file = dir.join("usage.json");
    let options = RunOptions {
        steps: 2,
        data: data.into(),
        usage: Some(file.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap_or_else(|e| panic!("{e}"));
    let text = std::fs::read_to_string(file).expect("what it used");
    serde_json::from_str::<serde_json::Value>(&text).expect("JSON")["launches"].clone()
}

#[test]
fn what_has_no_kernel_is_the_interpreters_and_is_warned_of() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model.json");
    std::fs::write(&model, DOUBLES).expect("written");
    let settings = ["loss.kind=output", "loss.logits=loss", "precision.compute=fp32"];
    let planned = plan_at(&model, 2, &settings);
    let plan = &planned.compiled.plan;
    let interpreted: Vec<&Kernel> =
        plan.kernels.iter().filter(|k| k.entry == Entry::Interpreter).collect();
    let [kernel] = interpreted[..] else { panic!("{} kernels", interpreted.len()) };
    assert!(kernel.name.starts_with("arg_reduce"), "{}", kernel.name);
    let warnings: Vec<_> = plan.lints.iter().filter(|d| d.code == "W098").collect();
    let [warning] = warnings[..] else { panic!("{:?}", plan.lints) };
    assert!(warning.message.contains("arg_reduce(f64[2, 4])"), "{}", warning.message);
    assert_eq!(&*warning.origin.scope, "vote");
    let path = planned.path();
    let args = ["frit", "inspect", path.to_str().expect("a path"), "--view", "kernels"];
    let text = execute(&Cli::parse_from(args)).expect("a table");
    assert!(text.lines().any(|l| l.contains("arg_reduce") && l.ends_with("interpreter")), "{text}");
    // It is executed, and counted.
    let data = dir.path().join("data.safetensors");
    let x: Vec<u8> = [0.5_f32; 24].iter().flat_map(|x| x.to_le_bytes()).collect();
    let n: Vec<u8> = (0..32).flat_map(|x| f64::from(x * 7 % 5).to_le_bytes()).collect();
    let view = |dtype, shape: Vec<usize>, bytes| {
        safetensors::tensor::TensorView::new(dtype, shape, bytes).expect("fits")
    };
    let tensors = [
        ("x", view(safetensors::Dtype::F32, vec![8, 3], &x[..])),
        ("n", view(safetensors::Dtype::F64, vec![8, 4], &n[..])),
    ];
    safetensors::serialize_to_file(tensors, None, &data).expect("written");
    let used = usage(&planned, dir.path(), &data);
    assert_eq!(used["interpreted"], 1, "{used}");
}

#[test]
fn nothing_is_interpreted_that_has_a_kernel() {
    for (model, settings) in [
        ("mlp", &["precision.compute=fp32"][..]),
        ("gpt2", &["precision.compute=bf16", "sharding.ranks=2"]),
        ("llama", &["precision.compute=bf16", "optimizer.kind=adafactor"]),
        ("bert", &["precision.compute=fp16", "optimizer.kind=muon"]),
        ("t5", &["precision.compute=bf16", "memory.recompute=unit"]),
        ("moe_dispatch", &["precision.compute=bf16"]),
        ("lstm", &["precision.compute=fp32"]),
        ("resnet", &["precision.compute=bf16"]),
        ("vit", &["precision.compute=bf16"]),
        ("dropout", &["precision.compute=bf16"]),
    ] {
        let model = format!("tests/models/{model}/model.onnx");
        let compiled = compile_at(&file(&model), 4, settings);
        for kernel in &compiled.plan.kernels {
            assert_ne!(kernel.entry, Entry::Interpreter, "{model}:\n{}", kernel.body);
        }
        assert!(compiled.plan.lints.iter().all(|d| d.code != "W098"));
    }
}

/// The runtime does what the plan lists, whatever it could do instead.
#[test]
fn a_cpu_executes_what_the_plan_lists() {
    let mut planned = plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp32"]);
    let (dir, data) = (planned.dir.path().to_owned(), file("tests/models/mlp/data.safetensors"));
    let listed = usage(&planned, &dir, &data);
    let count = |usage: &serde_json::Value, kind: &str| usage[kind].as_u64().unwrap_or(0);
    assert!(count(&listed, "library") > 0 && count(&listed, "interpreted") == 0, "{listed}");
    let routines = planned.compiled.plan.kernels.iter_mut();
    for kernel in routines.filter(|k| matches!(k.entry, Entry::Routine(_))) {
        kernel.entry = Entry::Interpreter;
        kernel.bind();
    }
    std::fs::remove_dir_all(planned.path()).expect("removed");
    frit::plan_dir::write(&planned.path(), &planned.compiled, Stored::Copy)
        .unwrap_or_else(|e| panic!("{e}"));
    let changed = usage(&planned, &dir, &data);
    assert_eq!(count(&changed, "library"), 0, "{changed}");
    assert_eq!(count(&changed, "interpreted"), count(&listed, "library"), "{changed}");
}

/// Nothing is launched on a GPU that the plan does not list, neither when candidates are measured nor in a step; and
/// where a plan lists no candidates, there is no choice.
#[test]
fn a_gpu_executes_what_the_plan_lists() {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    for model in ["gpt2", "resnet"] {
        let mut planned = plan(&format!("tests/models/{model}/model.onnx"), 4, &cuda);
        let listed: BTreeSet<String> = names(&planned.compiled.plan);
        let launched = |planned: &Planned| -> (BTreeSet<String>, usize, usize) {
            let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
            let mut driver = Recording::new((9, 0));
            driver.engines = Some(2);
            let mut device = crate::cuda::open(&dir, driver).unwrap_or_else(|e| panic!("{e}"));
            let mut calls = device.driver().take();
            calls.extend(crate::cuda::step(&mut device, &dir.plan, dir.plan.tasks.next_key()));
            let (mut names, mut operations, mut epilogues) = (BTreeSet::new(), 0, 0);
            for call in calls {
                match call {
                    Call::Launch(name, ..) => drop(names.insert(name)),
                    Call::Execute(..) => operations += 1,
                    Call::Multiply(gemm, ..) => {
                        epilogues +=
                            usize::from(["gelu", "bias", "bgrad"].iter().any(|e| gemm.contains(e)));
                    }
                    _ => {}
                }
            }
            (names, operations, epilogues)
        };
        let (names, operations, epilogues) = launched(&planned);
        assert!(names.is_subset(&listed), "{:?}", names.difference(&listed));
        assert!(operations + epilogues > 0, "{model} has candidates");
        for kernel in &mut planned.compiled.plan.kernels {
            if let Entry::Launches(selected) = &mut kernel.entry {
                selected.scratch_bytes = selected.most_scratch_bytes();
                let launches = std::mem::take(&mut selected.launches);
                selected.launches = launches.into_iter().flat_map(fallback).collect();
                kernel.bind();
            }
        }
        std::fs::remove_dir_all(planned.path()).expect("removed");
        frit::plan_dir::write(&planned.path(), &planned.compiled, Stored::Copy)
            .unwrap_or_else(|e| panic!("{e}"));
        let (names, operations, epilogues) = launched(&planned);
        assert!(names.is_subset(&listed));
        assert_eq!([operations, epilogues], [0, 0], "{model}");
    }
}

/// Every kernel that a plan lists, by the name that it is launched by.
fn names(plan: &Plan) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for kernel in &plan.kernels {
        match &kernel.entry {
            Entry::Launches(selected) => {
                all.extend(selected.every_launch().into_iter().filter_map(|l| match l {
                    Launch::Source(kernel) => Some(kernel.entry.clone()),
                    _ => None,
                }));
            }
            entry => all.extend(entry.symbols().into_iter().map(str::to_string)),
        }
    }
    all
}

/// A launch without candidates.
fn fallback(launch: Launch) -> Vec<Launch> {
    match launch {
        Launch::Choice(mut candidates) => {
            let fallback_of = candidates.pop().expect("a fallback").launches;
            fallback_of.into_iter().flat_map(fallback).collect()
        }
        launch => vec![launch],
    }
}
