//! Evaluations on the CUDA device, with a driver that records calls.

use crate::cuda::{body, open, replay, step};
use crate::support::{Planned, file, plan_to_evaluate};
use frit_cuda::driver::StreamHandle;
use frit_cuda::recording::{Call, Recording};
use frit_ir::plan::{Action, ParamHome, Plan};
use frit_runtime::device::Device;
use frit_runtime::plan_dir::PlanDir;
use frit_runtime::validation::Validation;
use std::collections::HashSet;

fn planned(model: &str, ranks: usize) -> Planned {
    let ranks = format!("sharding.ranks={ranks}");
    let settings = ["target.device=cuda", "target.arch=sm_80", &ranks];
    plan_to_evaluate(&format!("tests/models/{model}/model.onnx"), 4, &settings)
}

fn collectives(plan: &Plan) -> usize {
    plan.tasks
        .iter()
        .filter(|t| {
            matches!(
                t.action,
                Action::AllGather { .. } | Action::ReduceScatter { .. } | Action::AllReduce { .. }
            )
        })
        .count()
}

#[test]
fn an_evaluation_is_one_graph() {
    for (model, ranks) in [("gpt2", 1), ("gpt2", 4), ("resnet", 1)] {
        let planned = planned(model, ranks);
        let dir = PlanDir::load_evaluation(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
        let plan = &dir.plan;
        let mut device = open(&dir, Recording::new((8, 0))).unwrap_or_else(|e| panic!("{e}"));
        let end = plan.tasks.next_key();
        let calls = step(&mut device, plan, end);
        let issued = calls.iter().filter(|c| matches!(c, Call::Collective(..))).count();
        assert_eq!(issued, collectives(plan), "{model}");
        assert_eq!(collectives(plan) > 0, ranks > 1, "{model}");
        replay(plan, body(&calls, plan.fed().count()));
        step(&mut device, plan, end);
        let again = step(&mut device, plan, end);
        assert_eq!(again.iter().filter(|c| matches!(c, Call::LaunchGraph(..))).count(), 1);
        assert!(
            !again.iter().any(|c| matches!(c, Call::Launch(..) | Call::Multiply(..))),
            "{model}"
        );
        // It has no metrics, but what went wrong is asked for with them.
        device.note_metrics().unwrap();
        assert!(device.take_metrics().unwrap().is_empty());
    }
}

/// Bytes of what rank 0 owns of the trained parameters.
fn owned_bytes(plan: &Plan) -> usize {
    let sharded = plan.groups.iter().flat_map(|g| g.segments.iter().map(move |s| (g, s)));
    let sharded: usize = sharded.filter_map(|(g, s)| g.owned(s, 0)).map(|(_, _, n)| 4 * n).sum();
    let whole = plan.params.iter().filter(|p| matches!(p.home, ParamHome::Buffer(_)));
    sharded + whole.map(|p| p.ty.bytes()).sum::<usize>()
}

#[test]
fn validation_copies_the_parameters_and_runs_beside_the_training() {
    for (model, ranks) in [("gpt2", 1), ("mlp", 2)] {
        let planned = planned(model, ranks);
        let dir = PlanDir::load(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
        let data = file(&format!("tests/models/{model}/data.safetensors"));
        let validation = Validation::open(&dir).unwrap_or_else(|e| panic!("{e}"));
        let examples = validation.examples(&data.into()).unwrap_or_else(|e| panic!("{e}"));
        let mut trained = open(&dir, Recording::new((8, 0))).unwrap_or_else(|e| panic!("{e}"));
        let training: HashSet<StreamHandle> =
            step(&mut trained, &dir.plan, dir.plan.tasks.next_key())
                .iter()
                .filter_map(stream)
                .collect();
        let mut beside = trained.beside(&validation.dir).unwrap_or_else(|e| panic!("{e}"));
        validation.initialize(&mut beside, 0).unwrap_or_else(|e| panic!("{e}"));
        trained.driver().take();
        // The driver copies nothing out, so that nothing counts and there is no mean.
        let found = validation.measure(&trained, &mut beside, 0, &examples);
        assert!(found.unwrap_or_else(|e| panic!("{e}")).loss.is_nan());
        let calls = trained.driver().take();
        let out = |of_training: bool| -> usize {
            let bytes = |c: &Call| match c {
                Call::CopyOut(_, bytes, s) if training.contains(s) == of_training => *bytes,
                _ => 0,
            };
            calls.iter().map(bytes).sum()
        };
        let evaluation =
            PlanDir::load_evaluation(&planned.path()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(out(true), owned_bytes(&evaluation.plan), "{model}");
        // Everything that is launched is on the streams of the evaluation.
        let launched =
            |c: &&Call| matches!(c, Call::Launch(..) | Call::Multiply(..) | Call::Collective(..));
        let launches: Vec<&Call> = calls.iter().filter(launched).collect();
        assert!(!launches.is_empty());
        assert!(
            launches.iter().all(|c| stream(c).is_some_and(|s| !training.contains(&s))),
            "{model}"
        );
        // Training goes on as if nothing had happened: now it is captured.
        let again = step(&mut trained, &dir.plan, dir.plan.tasks.next_key());
        assert!(again.iter().any(|c| matches!(c, Call::LaunchGraph(_, s) if training.contains(s))));
        // It comes after the collectives of the evaluation, of which a rank need not have seen the end.
        let evaluating: HashSet<StreamHandle> = launches.into_iter().filter_map(stream).collect();
        let captured = again.iter().position(|c| matches!(c, Call::BeginCapture(_)));
        let mut before = again[..captured.expect("a capture")].iter();
        let ended = before.find_map(|c| match c {
            Call::Record(event, s) if evaluating.contains(s) => Some(*event),
            _ => None,
        });
        let waits =
            |c: &Call| matches!(c, Call::Wait(s, e) if training.contains(s) && Some(*e) == ended);
        assert!(ended.is_some() && before.any(waits), "{model}");
    }
}

/// The stream on which a call puts something.
fn stream(call: &Call) -> Option<StreamHandle> {
    match call {
        Call::Launch(_, _, _, s)
        | Call::Multiply(_, _, s)
        | Call::Collective(_, _, _, s)
        | Call::CopyOut(_, _, s)
        | Call::CopyIn(_, _, s)
        | Call::Copy(_, _, _, s)
        | Call::Zero(_, _, s) => Some(*s),
        _ => None,
    }
}
