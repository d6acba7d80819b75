//! cuDNN beside Frit's own kernels: what is chosen when a plan is loaded, and, with the real library but without a
//! GPU, whether it has engines for what plans ask of it.

use crate::cuda::{open, step};
use crate::support::{Planned, compile_at, file, plan};
use frit_ir::ops::{Attention, AttentionGrad, Conv, ConvGradInput, ConvGradWeight, Input, Window};
use frit_ir::plan::KernelKind;
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, TensorType};
use frit_runtime::device::cuda::cudnn::Cudnn;
use frit_runtime::device::cuda::recipe::{Launch, Offer, Operation, Recipe};
use frit_runtime::device::cuda::recording::{Call, Recording};
use frit_runtime::plan_dir::PlanDir;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const MODEL: &str = "tests/models/resnet/model.onnx";

fn planned(settings: &[&str]) -> (Planned, PlanDir) {
    planned_of(MODEL, settings)
}

fn planned_of(model: &str, settings: &[&str]) -> (Planned, PlanDir) {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    let planned = plan(model, 4, &[&cuda, settings].concat());
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    (planned, dir)
}

/// What a recipe offers to cuDNN.
fn offers(recipe: &Recipe) -> Vec<&Offer> {
    let launches = recipe.every_launch().into_iter();
    launches
        .filter_map(|l| if let Launch::Offer(offer) = l { Some(&**offer) } else { None })
        .collect()
}

/// A driver with so many engines for everything, of which the second is the fastest by far.
fn with_engines(n: usize) -> Recording {
    let mut driver = Recording::new((9, 0));
    driver.engines = Some(n);
    // Convolutions are kernels, or products where the filters have one tap.
    driver.durations = vec![(" a:", 50.0), ("algorithm 2", 0.1), ("conv", 100.0)];
    driver
}

/// The names of what cuDNN computes in a step, and the number of calls.
fn executed(dir: &PlanDir, driver: Recording) -> (Vec<String>, usize) {
    let mut device = open(dir, driver).unwrap_or_else(|e| panic!("{e}"));
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.len());
    let names = calls.iter().filter_map(|c| match c {
        Call::Execute(name, ..) => Some(name.clone()),
        _ => None,
    });
    (names.collect(), calls.len())
}

#[test]
fn the_fastest_engine_computes_every_convolution() {
    let (planned, dir) = planned(&[]);
    let mut expected = 0;
    for task in &dir.plan.tasks {
        let frit_ir::plan::Action::Kernel { kernel, .. } = &task.action else { continue };
        let kernel = &dir.plan.kernels[*kernel];
        if kernel.kind == KernelKind::Library {
            expected += offers(&Recipe::of(&kernel.body).expect("a recipe")).len();
        }
    }
    let (names, _) = executed(&dir, with_engines(3));
    assert!(expected > 20 && names.len() == expected, "{expected}: {names:?}");
    assert!(names.iter().all(|n| n.ends_with(" algorithm 2")), "{names:?}");
    for kind in ["conv ", "conv_grad_input ", "conv_grad_weight "] {
        assert!(names.iter().any(|n| n.starts_with(kind)), "{kind}: {names:?}");
    }
    let text = std::fs::read_to_string(planned.path().join("tuning.json")).unwrap();
    assert!(text.contains("\"engine\": 2"), "{text}");

    // The choice is kept: nothing is measured again.
    let device = open(&dir, with_engines(3)).unwrap();
    let loading = device.driver().take();
    assert!(!loading.iter().any(|c| matches!(c, Call::Execute(..) | Call::BeginCapture(_))));
    let (again, _) = executed(&dir, with_engines(3));
    assert_eq!(again, names);
}

#[test]
fn attention_is_computed_by_the_fastest_engine_or_by_frits_own_kernels() {
    let (_planned, dir) = planned_of("tests/models/gpt2/model.onnx", &[]);
    let engines = || {
        let mut driver = with_engines(3);
        driver.durations.push(("attention", 100.0));
        driver
    };
    let (names, _) = executed(&dir, engines());
    let attentions = |names: &[String]| {
        names.iter().filter(|n| n.starts_with("attention causal scale ")).count()
    };
    assert_eq!(attentions(&names), 2, "{names:?}");
    assert!(names.iter().all(|n| n.ends_with(" algorithm 2")), "{names:?}");

    let (_planned, dir) = planned_of("tests/models/gpt2/model.onnx", &[]);
    let launches = |driver: Recording| {
        let mut device = open(&dir, driver).unwrap_or_else(|e| panic!("{e}"));
        let calls = step(&mut device, &dir.plan, dir.plan.tasks.len());
        let own = |c: &&Call| matches!(c, Call::Launch(name, ..) if name == "attention");
        (calls.iter().filter(own).count(), calls.len())
    };
    let mut slow = engines();
    slow.durations = vec![("algorithm", 1e6)];
    let (own, calls) = launches(slow);
    assert_eq!((own, calls), launches(Recording::new((9, 0))), "as without the library");
    assert_eq!(own, 2);
}

#[test]
fn frits_own_kernels_run_where_they_are_faster() {
    let (planned, dir) = planned(&[]);
    let slow = || {
        let mut driver = Recording::new((9, 0));
        driver.engines = Some(3);
        driver.durations = vec![("algorithm", 1e6)];
        driver
    };
    let (names, _) = executed(&dir, slow());
    assert!(names.is_empty(), "{names:?}");
    let text = std::fs::read_to_string(planned.path().join("tuning.json")).unwrap();
    assert!(text.contains(": null"), "{text}");
    // That is kept, too.
    let device = open(&dir, slow()).unwrap();
    assert!(!device.driver().take().iter().any(|c| matches!(c, Call::BeginCapture(_))));
}

#[test]
fn an_engine_that_fails_is_passed_over() {
    let (_planned, dir) = planned(&[]);
    let mut driver = with_engines(2);
    driver.broken = Some(2);
    let (names, _) = executed(&dir, driver);
    assert!(!names.is_empty() && names.iter().all(|n| n.ends_with(" algorithm 1")), "{names:?}");
}

#[test]
fn an_algorithm_of_a_product_that_fails_is_passed_over() {
    let (_planned, dir) = planned(&[]);
    let broken = |number| {
        let mut driver = Recording::new((9, 0));
        driver.broken = Some(number);
        driver
    };
    let mut device = open(&dir, broken(1)).unwrap();
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.len());
    let mut products = calls.iter().filter_map(|c| match c {
        Call::Multiply(name, ..) => Some(name),
        _ => None,
    });
    assert!(products.clone().count() > 0);
    assert!(products.all(|name| name.ends_with(" algorithm 2")));
}

#[test]
fn without_the_library_frits_own_kernels_run_and_have_the_memory() {
    let (_planned, dir) = planned(&[]);
    let memory = |driver: Recording| {
        let device = open(&dir, driver).unwrap();
        let allocated = device.driver().take();
        allocated.iter().find_map(|c| if let Call::Allocate(n) = c { Some(*n) } else { None })
    };
    let (without, with) = (memory(Recording::new((9, 0))), memory(with_engines(1)));
    assert!(without < with, "{without:?} and {with:?}");
    let (names, calls) = executed(&dir, Recording::new((9, 0)));
    assert!(names.is_empty() && calls > 0);
}

/// A GPU that is not there, as cuDNN describes them: name, compute capability, multiprocessors, shared memory of each,
/// and level 2 cache in bytes, from NVIDIA's data sheets.
fn described(name: &str, version: u32, processors: u32, shared: u32, cache: u32) -> String {
    let block = shared - 1024;
    format!(
        r#"{{"name":"{name}","deviceName":"{name}","deviceVer":{version},"driverVer":13000,"cudaVer":13000,
        "cudaDeviceId":0,"pciDeviceId":0,"multiProcessorCount":{processors},"warpSize":32,"isTccDriver":0,
        "maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
        "smClockRateKHz":1410000,"memClockRateKHz":1593000,"l2CacheSize":{cache},
        "maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":{block},
        "reservedSharedMemoryPerBlock":1024,"oversizedSharedMemoryPerBlock":0,"sharedMemoryPerSM":{shared},
        "maxSharedMemoryPerSM":{shared},"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
        "maxThreadsPerSM":2048,"supportCoopLaunch":1,"totalGlobalMem":84929347584}}"#
    )
}

/// The operations that the given models ask for, by their key.
fn operations_of_models() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    let bf16 = ["precision.compute=bf16"];
    let f32 = ["precision.compute=fp32"];
    let unet = ["precision.compute=bf16", "loss.kind=mse"];
    for (model, settings) in [
        ("resnet", &bf16[..]),
        ("resnet", &f32[..]),
        ("vit", &bf16[..]),
        ("gpt2", &bf16[..]),
        ("unet", &unet[..]),
    ] {
        let settings = [&["target.device=cuda"], settings].concat();
        let compiled = compile_at(&file(&format!("tests/models/{model}/model.onnx")), 4, &settings);
        let library = compiled.plan.kernels.iter().filter(|k| k.kind == KernelKind::Library);
        for kernel in library {
            let recipe = Recipe::of(&kernel.body).expect("a recipe");
            for offer in offers(&recipe) {
                all.insert(offer.operation.to_string(), offer.operation.clone());
            }
        }
    }
    all
}

/// A convolution and its gradients: images, filters, groups.
fn convolutions(
    all: &mut BTreeMap<String, Operation>,
    (dtype, weights): (DType, Option<DType>),
    window: Window,
    groups: usize,
    (x, w): (&[usize], &[usize]),
) {
    let positions = window.positions(&x[2..], &w[2..]).expect("a window that fits");
    let y = [&[x[0], w[0]], &positions[..]].concat();
    let (size, taps) = (x[2..].to_vec(), w[2..].to_vec());
    let conv = Conv { window: window.clone(), groups, out: None };
    let grad_input = ConvGradInput { window: window.clone(), groups, size, out: None };
    let grad_weight = ConvGradWeight { window, groups, taps, out: weights };
    for (op, operands) in [
        (Op::Conv(conv), [x, w]),
        (Op::ConvGradInput(grad_input), [&y[..], w]),
        (Op::ConvGradWeight(grad_weight), [&y[..], x]),
    ] {
        let types = operands.map(|dims| TensorType::new(dtype, dims));
        offered(all, op, &types.each_ref());
    }
}

/// Convolutions that models rarely have.
fn awkward_operations() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    let uneven =
        Window { strides: vec![2, 1], dilations: vec![1, 2], low: vec![1, 0], high: vec![0, 3] };
    let same = Window { low: vec![1, 1], high: vec![1, 1], ..Window::plain(2) };
    let line = Window { strides: vec![3], low: vec![2], high: vec![1], ..Window::plain(1) };
    for types in [
        (DType::BF16, Some(DType::F32)),
        (DType::F16, None),
        (DType::F32, None),
        (DType::F64, None),
    ] {
        let mut add = |window: &Window, groups, x: &[usize], w: &[usize]| {
            convolutions(&mut all, types, window.clone(), groups, (x, w));
        };
        add(&uneven, 1, &[2, 8, 7, 9], &[16, 8, 3, 2]);
        add(&same, 2, &[2, 16, 6, 6], &[32, 8, 3, 3]);
        add(&same, 32, &[4, 32, 14, 14], &[32, 1, 3, 3]);
        add(&line, 1, &[2, 8, 50], &[8, 8, 7]);
        add(&Window::plain(3), 1, &[2, 8, 4, 5, 6], &[8, 8, 2, 3, 2]);
        add(&same, 1, &[3, 9, 7, 9], &[130, 9, 3, 3]);
    }
    all
}

/// Attention and its gradient: of the given sizes of models, and awkward ones.
fn attentions() -> BTreeMap<String, Operation> {
    let mut all = BTreeMap::new();
    // Batch, query heads, key heads, queries, keys, sizes of keys and of values.
    for (dtype, causal, [b, h, g, t, s, d, e]) in [
        // GPT-2 of 124M, 774M and 1.5B parameters.
        (DType::BF16, true, [8, 12, 12, 1024, 1024, 64, 64]),
        (DType::BF16, true, [4, 20, 20, 1024, 1024, 64, 64]),
        (DType::F16, true, [2, 25, 25, 1024, 1024, 64, 64]),
        // Llama with shared key heads, BERT without a mask.
        (DType::BF16, true, [1, 32, 8, 2048, 2048, 128, 128]),
        (DType::BF16, false, [8, 12, 12, 512, 512, 64, 64]),
        (DType::F16, true, [2, 6, 1, 128, 384, 96, 40]),
        // Forward only.
        (DType::BF16, true, [1, 2, 2, 77, 100, 256, 200]),
        (DType::F16, false, [3, 4, 2, 1, 7, 8, 16]),
    ] {
        let ty = |dims: [usize; 4]| TensorType::new(dtype, dims);
        let [q, k, v, y] = [ty([b, h, t, d]), ty([b, g, s, d]), ty([b, g, s, e]), ty([b, h, t, e])];
        let lse = TensorType::new(DType::F32, [b, h, t]);
        let (scale, mask_grad) = (0.125, false);
        for (op, operands) in [
            (Op::Attention(Attention { scale, causal, window: None }), vec![&q, &k, &v]),
            (
                Op::AttentionGrad(AttentionGrad { scale, causal, window: None, mask_grad }),
                vec![&y, &q, &k, &v, &y, &lse],
            ),
        ] {
            offered(&mut all, op, &operands);
        }
    }
    all
}

/// Adds what the recipe of an operation offers.
fn offered(all: &mut BTreeMap<String, Operation>, op: Op, operands: &[&TensorType]) {
    let mut body = Graph::new("kernel");
    let mut add = |op: Op, inputs: &[_]| {
        body.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
    };
    let inputs: Vec<_> = operands
        .iter()
        .enumerate()
        .map(|(i, ty)| add(Op::Input(Input { name: i.to_string(), ty: (*ty).clone() }), &[])[0])
        .collect();
    let results = add(op, &inputs);
    for (i, result) in results.into_iter().enumerate() {
        body.add_output(&i.to_string(), result, OutputKind::Result);
    }
    let recipe = Recipe::of(&body).expect("a recipe");
    for offer in offers(&recipe) {
        all.insert(offer.operation.to_string(), offer.operation.clone());
    }
}

/// Operations that have no engine on a GPU of this compute capability: sums of 2-byte elements that are written as f32,
/// of groups before sm_90, and of numbers of channels that are no multiple of eight.
fn is_unsupported(operation: &Operation, version: u32) -> bool {
    let [image, filters, _] = &operation.tensors[..] else { return false };
    let widens = image.dtype != filters.dtype;
    let grouped = image.sizes[1] != filters.sizes[1];
    let uneven = filters.sizes[..2].iter().any(|n| !n.is_multiple_of(8));
    widens && (uneven || (grouped && version < 900))
}

/// The folders of the real library and of those that it loads.
fn libraries() -> Option<Vec<PathBuf>> {
    let found = std::env::var_os("FRIT_CUDNN");
    let found = found.map(|dirs| std::env::split_paths(&dirs).collect());
    if found.is_none() {
        eprintln!("SKIPPED: cuDNN was not found (set FRIT_CUDNN): engines are not looked for");
    }
    found
}

/// A driver without a GPU, in a folder: the library compiles some engines only if it finds one.
fn driver_without_gpu(dir: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(dir.join("libcuda.so.1"))
        .arg(file("tests/suite/cudnn/libcuda.c"))
        .arg("-ldl")
        .status()
        .unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(status.success(), "the driver does not compile");
}

/// Looks for engines in a process of its own, which alone sees the driver without a GPU.
#[test]
fn the_real_library_has_a_deterministic_engine_for_every_operation() {
    let Some(libraries) = libraries() else { return };
    if std::env::var_os("FRIT_CUDNN_CHILD").is_some() {
        return look_for_engines();
    }
    let dir = tempfile::tempdir().expect("a directory");
    driver_without_gpu(dir.path());
    let compiler = std::env::var_os("FRIT_NVRTC").map(PathBuf::from);
    let compiler = compiler.as_deref().and_then(Path::parent).map(Path::to_path_buf);
    let folders = std::env::join_paths(libraries.into_iter().chain(compiler)).expect("paths");
    let name = "cudnn::the_real_library_has_a_deterministic_engine_for_every_operation";
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env("FRIT_CUDNN_CHILD", "1")
        .env("LD_LIBRARY_PATH", dir.path())
        .env("FRIT_CUDA_PATH", folders)
        .output()
        .expect("this program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
    eprintln!("{said}");
}

/// Why none of the engines that are offered becomes a plan of execution, if none does.
fn problem(cudnn: &Cudnn, operation: &Operation) -> Option<String> {
    let workspace_bytes = operation.workspace_bytes();
    let engines = match cudnn.engines(operation, workspace_bytes) {
        Ok(engines) => engines,
        Err(e) => return Some(e.to_string()),
    };
    let mut reason = "no engine".to_string();
    for engine in &engines {
        match cudnn.prepare(operation, engine, workspace_bytes) {
            Ok(_) => return None,
            Err(e) => reason = e.to_string(),
        }
    }
    Some(reason)
}

fn look_for_engines() {
    let mut operations = operations_of_models();
    operations.extend(awkward_operations());
    let attentions = attentions();
    assert_eq!(attentions.len(), 14, "six with gradients: {:?}", attentions.keys());
    operations.extend(attentions);
    assert!(operations.len() > 60, "{}", operations.len());
    let (mut wrong, mut ready) = (Vec::new(), 0);
    for (version, device) in [
        (800, described("NVIDIA A100", 800, 108, 167_936, 41_943_040)),
        (900, described("NVIDIA H100", 900, 132, 233_472, 52_428_800)),
    ] {
        let cudnn = Cudnn::for_described(&device).unwrap_or_else(|e| panic!("{e}"));
        for (key, operation) in &operations {
            let reason = problem(&cudnn, operation);
            ready += usize::from(reason.is_none());
            if reason.is_some() != is_unsupported(operation, version) {
                wrong.push(format!(
                    "sm_{version} {key}: {}",
                    reason.unwrap_or_else(|| "has an engine".into())
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    eprintln!("{ready} of {} plans of execution are ready", 2 * operations.len());
}
