//! cuDNN and Frit's own kernels: which candidate is selected when a plan is loaded and, with the real library but
//! without a GPU, whether it has engines for the operations of plans.

mod engines;
mod operations;

use crate::cuda::{open, step};
use crate::support::{Planned, file, plan, plan_at};
use frit_cuda::recording::{Call, Recording};
use frit_ir::plan::{Entry, Launch, Launches, Operation};
use frit_runtime::plan_dir::PlanDir;

const MODEL: &str = "tests/models/resnet/model.onnx";

fn planned(settings: &[&str]) -> (Planned, PlanDir) {
    planned_of(MODEL, settings)
}

fn planned_of(model: &str, settings: &[&str]) -> (Planned, PlanDir) {
    let cuda = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    loaded(plan(model, 4, &[&cuda, settings].concat()))
}

fn loaded(planned: Planned) -> (Planned, PlanDir) {
    let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
    (planned, dir)
}

/// A language model whose attention has as many queries and keys as the gradient's engines take.
fn planned_of_text() -> (Planned, PlanDir) {
    let text = std::fs::read_to_string(file("examples/char_gpt2/model.json")).expect("a model");
    let longer = text.replace("\"seq\": 64", "\"seq\": 128");
    assert_ne!(text, longer, "the model has another length");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.json");
    std::fs::write(&path, longer).expect("written");
    let settings = ["target.device=cuda", "target.arch=sm_80", "precision.compute=bf16"];
    loaded(plan_at(&path, 2, &settings))
}

/// What cuDNN may compute of a kernel.
fn operations_of(selected: &Launches) -> Vec<&Operation> {
    let launches = selected.every_launch().into_iter();
    launches
        .filter_map(
            |l| if let Launch::Operation(launch) = l { Some(&launch.operation) } else { None },
        )
        .collect()
}

/// A driver with so many engines for everything, of which the second is the fastest by far.
fn with_engines(n: usize) -> Recording {
    let mut driver = Recording::new((9, 0));
    driver.engines = Some(n);
    // Convolutions are kernels, or GEMMs where the filters have one tap; cuDNN's own form of variances costs little.
    driver.durations = vec![(" a:", 50.0), ("algorithm 2", 0.1)];
    driver.durations.extend(["_var", "_rstd"].map(|name| (name, 1.0)));
    driver.durations.extend(["conv", "pool", "batch_norm", "attention"].map(|n| (n, 100.0)));
    driver
}

/// The names of what cuDNN computes in a step, and the number of calls.
fn executed(dir: &PlanDir, driver: Recording) -> (Vec<String>, usize) {
    let mut device = open(dir, driver).unwrap_or_else(|e| panic!("{e}"));
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
    let names = calls.iter().filter_map(|c| match c {
        Call::Execute(name, ..) => Some(name.clone()),
        _ => None,
    });
    (names.collect(), calls.len())
}

#[test]
fn the_fastest_engine_computes_every_operation() {
    // Of images that lie channels last, as those of 16 bits do, Frit's kernels pool and normalize.
    let settings = ["target.device=cuda", "target.arch=sm_80", "precision.compute=fp32"];
    let (_planned, wide) = loaded(plan(MODEL, 4, &settings));
    let (planned, dir) = planned(&[]);
    let others = ["max_pool ", "batch_norm ", "batch_norm_grad "];
    for (dir, others) in [(&wide, &others[..]), (&dir, &others[..0])] {
        let mut expected = 0;
        for task in &dir.plan.tasks {
            let frit_ir::plan::Action::Kernel { kernel, .. } = &task.action else { continue };
            let kernel = &dir.plan.kernels[*kernel];
            if let Entry::Launches(selected) = &kernel.entry {
                expected += operations_of(selected).len();
            }
        }
        let (names, _) = executed(dir, with_engines(3));
        assert!(expected > 20 && names.len() == expected, "{expected}: {names:?}");
        assert!(names.iter().all(|n| n.ends_with(" algorithm 2")), "{names:?}");
        let convs = ["conv ", "conv_grad_input ", "conv_grad_weight "];
        for kind in convs.iter().chain(others) {
            assert!(names.iter().any(|n| n.starts_with(kind)), "{kind}: {names:?}");
        }
        assert!(!names.iter().any(|n| n.starts_with("max_pool_grad")), "{names:?}");
    }
    let text = std::fs::read_to_string(planned.path().join("tuning.json")).unwrap();
    let chosen = r#"{"chosen":{"candidate":"cudnn","with":{"engine":2"#;
    assert!(text.contains(chosen), "{text}");
    // Every candidate's time is kept.
    for candidate in ["frit", "cudnn", "cublaslt"] {
        assert!(text.contains(&format!("{{\"candidate\":\"{candidate}\"")), "{candidate}: {text}");
    }

    // The choice is kept: nothing is measured again.
    let (names, _) = executed(&dir, with_engines(3));
    let device = open(&dir, with_engines(3)).unwrap();
    let loading = device.driver().take();
    assert!(!loading.iter().any(|c| matches!(c, Call::Execute(..) | Call::BeginCapture(_))));
    let (again, _) = executed(&dir, with_engines(3));
    assert_eq!(again, names);
}

/// How many of the operations and of the kernels of a step are of this name, and the number of calls.
fn of_kind(dir: &PlanDir, driver: Recording, name: &str) -> (usize, usize, usize) {
    let mut device = open(dir, driver).unwrap_or_else(|e| panic!("{e}"));
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
    let operation = |c: &&Call| match c {
        Call::Execute(full, ..) => {
            assert!(full.ends_with(" algorithm 2"), "{full}");
            full.split(' ').next() == Some(name)
        }
        _ => false,
    };
    let kernel = |c: &&Call| matches!(c, Call::Launch(full, ..) if full.starts_with(name));
    (calls.iter().filter(operation).count(), calls.iter().filter(kernel).count(), calls.len())
}

#[test]
fn attention_and_its_gradient_are_computed_by_the_fastest_engine_or_by_frits_own_kernels() {
    let slow = || {
        let mut driver = with_engines(3);
        driver.durations = vec![("algorithm", 1e6)];
        driver
    };
    let blocks = 4;
    for (name, kernels) in [("attention", 1), ("attention_grad", 2)] {
        let (_planned, dir) = planned_of_text();
        let (operations, own, _) = of_kind(&dir, with_engines(3), name);
        assert_eq!(operations, blocks, "{name}");
        assert_eq!(own, 0, "{name}: Frit's own kernels run, too");

        let (_planned, dir) = planned_of_text();
        let (operations, own, calls) = of_kind(&dir, slow(), name);
        assert_eq!(operations, 0, "{name}");
        assert!(own >= kernels * blocks, "{name}: {own}");
        let without = of_kind(&dir, Recording::new((9, 0)), name);
        assert_eq!((operations, own, calls), without, "as without the library");
    }
}

#[test]
fn each_of_attention_and_its_gradient_is_chosen_for_itself() {
    let (_planned, dir) = planned_of_text();
    let mut driver = with_engines(3);
    // The gradient's engines are slow, those of attention are not.
    driver.durations.insert(0, ("attention_grad causal", 1e6));
    let (operations, ..) = of_kind(&dir, driver, "attention");
    assert_eq!(operations, 4);
    let (operations, own, _) = of_kind(&dir, with_engines(3), "attention_grad");
    assert!(operations == 0 && own > 0, "the choice is kept: {operations}, {own}");
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
    assert!(text.contains(r#"{"chosen":{"candidate":"frit"}"#), "{text}");
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
fn an_algorithm_of_a_gemm_that_fails_is_passed_over() {
    let (_planned, dir) = planned(&[]);
    let broken = |number| {
        let mut driver = Recording::new((9, 0));
        driver.broken = Some(number);
        driver
    };
    let mut device = open(&dir, broken(1)).unwrap();
    let calls = step(&mut device, &dir.plan, dir.plan.tasks.next_key());
    let mut gemms = calls.iter().filter_map(|c| match c {
        Call::Multiply(name, ..) => Some(name),
        _ => None,
    });
    assert!(gemms.clone().count() > 0);
    assert!(gemms.all(|name| name.ends_with(" algorithm 2")));
}

#[test]
fn without_the_library_frits_own_kernels_run_and_have_the_memory() {
    let (_planned, dir) = planned(&[]);
    let (names, calls) = executed(&dir, Recording::new((9, 0)));
    assert!(names.is_empty() && calls > 0);
}

#[test]
fn of_the_workspace_of_engines_only_what_the_choice_needs_is_kept() {
    const GEMMS: usize = 32 << 20;
    // More than GEMMs have, and no more than the larger convolutions may use.
    const ENGINE: usize = GEMMS + (64 << 10);
    // Sizes of what is allocated in the end, and of what was meanwhile and given back.
    let memory = |dir: &PlanDir, mut driver: Recording| {
        driver.engine_bytes = ENGINE;
        let device = open(dir, driver).unwrap_or_else(|e| panic!("{e}"));
        let (mut held, mut lent) = (Vec::new(), Vec::new());
        for call in device.driver().take() {
            match call {
                Call::Allocate(bytes) => held.push(bytes),
                Call::Free(bytes) => {
                    assert_eq!(held.pop(), Some(bytes));
                    lent.push(bytes);
                }
                _ => {}
            }
        }
        assert_eq!(held.len(), 1, "one allocation is kept");
        (held[0], lent)
    };
    let slow = || {
        let mut driver = with_engines(3);
        driver.durations = vec![("algorithm", 1e6)];
        driver
    };
    let fresh = || planned(&[]);
    let (_planned, dir) = fresh();
    let (without, lent) = memory(&dir, Recording::new((9, 0)));
    assert_eq!(lent.len(), 1, "gemms are measured");
    let (_planned, dir) = fresh();
    let (own, lent) = memory(&dir, slow());
    assert_eq!(own, without, "engines that are slower need nothing");
    assert!(lent.len() == 1 && lent[0] > ENGINE, "{lent:?}");
    let (_planned, dir) = fresh();
    let (chosen, lent) = memory(&dir, with_engines(3));
    assert_eq!(chosen, without + ENGINE - GEMMS, "as much as one engine needs");
    assert_eq!(lent.len(), 1);
    let (again, lent) = memory(&dir, with_engines(3));
    assert!(again == chosen && lent.is_empty(), "nothing is measured again: {lent:?}");
}
