//! Kernels of a plan, executed by its device, compared with the IR interpreter; and the report of device resources.

use crate::support::{Planned, file, plan};
use frit_comm::local::LocalComm;
use frit_ir::plan::{BufferId, PhaseName, TaskId};
use frit_runtime::RunError;
use frit_runtime::compare::{Options, Report, compare, on_device};
use frit_runtime::data::Element;
use frit_runtime::device::cpu::Cpu;
use frit_runtime::device::{Device, Span};
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::usage::Usage;
use std::ops::Range;

fn options(planned: &Planned, model: &str) -> Options {
    Options {
        plan: planned.path(),
        data: vec![file(&format!("tests/models/{model}/data.safetensors"))],
        token_dtype: None,
        steps: 1,
        budget: 500,
        json: false,
        threads: Some(1),
        tuning_seconds: None,
    }
}

fn compared(model: &str, settings: &[&str]) -> Report {
    let planned = plan(&format!("tests/models/{model}/model.onnx"), 4, settings);
    compare(&options(&planned, model)).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_kernel_of_the_cpu_agrees() {
    for (model, precision) in [("gpt2", "bf16"), ("bert", "fp32"), ("resnet", "fp16")] {
        let report = compared(model, &[&format!("precision.compute={precision}")]);
        assert!(report.is_close(), "{model}: {}", report.render(false));
        assert!(report.left_out.is_empty() && report.kernels.len() > 40, "{model}");
        let narrow = match precision {
            "fp32" => "f32",
            "fp16" => "f16",
            other => other,
        };
        assert!(report.kernels.iter().any(|k| k.dtype == narrow), "{model}");
    }
}

#[test]
fn accumulation_and_several_steps_are_compared_as_they_run() {
    let planned = plan("tests/models/mlp/model.onnx", 2, &["run.accumulation=2"]);
    let one = compare(&options(&planned, "mlp")).unwrap();
    let two = compare(&Options { steps: 2, ..options(&planned, "mlp") }).unwrap();
    assert!(one.is_close() && two.is_close());
    let plan = &planned.compiled.plan;
    let micro = plan.phase(PhaseName::MicroStep).unwrap();
    assert_eq!(one.tasks, plan.tasks.len() + micro.tasks().len());
    assert_eq!(two.tasks, 2 * one.tasks);
}

/// A CPU that makes a mistake in one element of what one task writes.
struct Faulty<'a> {
    cpu: Cpu<'a, LocalComm>,
    dir: &'a PlanDir,
    task: TaskId,
    /// By how much of itself the element is wrong.
    part: f32,
}

impl Device for Faulty<'_> {
    const METRICS_DELAY: usize = 0;

    fn run(&mut self, tasks: Range<TaskId>) -> Result<(), RunError> {
        self.cpu.run(tasks.clone())?;
        if tasks.contains(&self.task) {
            let place = self.dir.plan.tasks[self.task].action.writes()[0].clone();
            let bytes = self.cpu.read(place.buffer, place.offset, place.ty.bytes())?;
            let mut values: Vec<f32> =
                bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let largest = values.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
            *values.last_mut().expect("an element") += self.part * largest;
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.cpu.write(place.buffer, place.offset, &bytes)?;
        }
        Ok(())
    }

    fn feed(&mut self, buffer: BufferId, element: Element, bytes: &[u8]) -> Result<(), RunError> {
        self.cpu.feed(buffer, element, bytes)
    }

    fn trace(&mut self, tasks: Range<TaskId>) -> Result<Vec<Span>, RunError> {
        self.cpu.trace(tasks)
    }

    fn note_metrics(&mut self) -> Result<(), RunError> {
        self.cpu.note_metrics()
    }

    fn take_metrics(&mut self) -> Result<Vec<f32>, RunError> {
        self.cpu.take_metrics()
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        self.cpu.write(buffer, offset, bytes)
    }

    fn read(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        self.cpu.read(buffer, offset, bytes)
    }

    fn gather(&self, buffer: BufferId, offset: usize, bytes: usize) -> Result<Vec<u8>, RunError> {
        self.cpu.gather(buffer, offset, bytes)
    }

    fn largest(&self, value: u64) -> Result<u64, RunError> {
        self.cpu.largest(value)
    }

    fn memory_in_use(&self) -> Option<u64> {
        self.cpu.memory_in_use()
    }

    fn usage(&self) -> Result<Usage, RunError> {
        self.cpu.usage()
    }
}

#[test]
fn one_wrong_element_is_found_where_it_is_made() {
    let planned = plan("tests/models/gpt2/model.onnx", 4, &["precision.compute=fp32"]);
    let dir = PlanDir::load(&planned.path()).unwrap();
    let is = |t: &frit_ir::plan::Task| t.name.starts_with("layer_norm");
    let task = dir.plan.tasks.position(is).expect("a norm");
    for (part, found) in [(1e-3, true), (1e-6, false)] {
        let comm = LocalComm::world(1).remove(0);
        let cpu = Cpu::new(&dir, comm, 1, false).unwrap();
        let mut device = Faulty { cpu, dir: &dir, task, part };
        let report = on_device(&dir, &mut device, &options(&planned, "gpt2")).unwrap();
        let far: Vec<&str> =
            report.kernels.iter().filter(|k| !k.is_close()).map(|k| k.task.as_str()).collect();
        let expected: &[&str] = if found { &[&dir.plan.tasks[task].name] } else { &[] };
        assert_eq!(far, expected);
        assert_eq!(report.render(false).contains("allowed 1.0e-4"), found);
        // The last element of the first tensor that the task writes.
        let place = &dir.plan.tasks[task].action.writes()[0];
        let last: Vec<usize> = place.ty.shape.dims().iter().map(|n| n - 1).collect();
        let mut worst = report.kernels.iter().filter(|k| !k.is_close()).map(|k| &k.worst);
        if let Some(Some(worst)) = worst.next() {
            let element = (worst.buffer.as_str(), &worst.index);
            assert_eq!(element, (dir.plan.buffers[place.buffer].name.as_str(), &last));
            let far = (worst.found - worst.expected).abs();
            assert!(far > 1e-4 && far < 1e-2, "{worst:?}");
        } else {
            assert!(!found, "the element is not named");
        }
    }
}

#[test]
fn what_costs_too_much_is_named_and_plans_of_several_ranks_are_refused() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &[]);
    let report = compare(&Options { budget: 0, ..options(&planned, "mlp") }).unwrap();
    assert!(report.left_out.len() > 10 && report.compared < 5);
    assert!(report.render(false).contains("not compared, see --budget"));
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let error = compare(&options(&planned, "mlp")).unwrap_err().to_string();
    assert!(error.contains("sharding.ranks=1"), "{error}");
}

#[test]
fn a_run_says_what_it_used() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["run.accumulation=2"]);
    let path = planned.dir.path().join("usage.json");
    let options = RunOptions {
        steps: 1,
        data: file("tests/models/mlp/data.safetensors").into(),
        usage: Some(path.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&planned.path(), &options).unwrap();
    let usage: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let plan = &planned.compiled.plan;
    assert_eq!(usage["device"], "cpu");
    assert_eq!(usage["workspace_bytes"], plan.workspace_bytes);
    assert!(usage.get("graph_launches").is_none() && usage.get("device_bytes").is_none());
    let launches: u64 =
        usage["launches"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    let micro = plan.phase(PhaseName::MicroStep).unwrap();
    assert_eq!(launches as usize, plan.tasks.len() + micro.tasks().len());
}
