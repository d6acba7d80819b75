//! `prefetch = "auto"`: never slower than `pre`, more communication overlapped, within memory, with equal results.

use crate::figures::{self, Line};
use crate::memory::{MODELS, STRATEGIES, predicted};
use crate::simulate::predict_llama;
use crate::support::{plan, train};
use frit_ir::Region;
use frit_ir::plan::{Action, Plan};
use frit_passes::cost::Cluster;
use frit_passes::shard::small;
use frit_passes::simulate::{Simulation, simulate};

/// Sizes of Llama 3 with 8 and with 70 billion parameters.
const LLAMA_8B: &str = "batch=1";
const LLAMA_70B: &str = "batch=1 layers=80 width=8192 heads=64 ffn=28672";
/// So few tokens that work hides little.
const SHORT: &str = "batch=1 layers=80 width=8192 heads=64 ffn=28672 seq=2048";

fn gathers(plan: &Plan, region: Region) -> usize {
    let is = |t: &&frit_ir::plan::Task| {
        matches!(t.action, Action::AllGather { .. }) && t.region == region
    };
    plan.tasks.iter().filter(is).count()
}

#[test]
fn it_is_never_slower_than_pre_on_any_given_model() {
    let h100 = Cluster::named("h100").unwrap();
    for model in MODELS {
        for strategy in &STRATEGIES[..4] {
            let fits = |s: &&str| *model != "resnet" || !s.starts_with("run.accumulation");
            let strategy: Vec<&str> = strategy.iter().copied().filter(fits).collect();
            let step = |prefetch: &str| {
                let more =
                    [prefetch, "sharding.ranks=4", "precision.compute=bf16", "target.cluster=h100"];
                simulate(&predicted(model, &[&strategy[..], &more].concat()), &h100)
            };
            let (pre, auto) = (step("sharding.prefetch=fixed"), step("sharding.prefetch=auto"));
            let what = format!("{model} {strategy:?}");
            assert!(auto.step_seconds <= pre.step_seconds, "{what}");
        }
    }
}

fn llama(binds: &str, ranks: usize, cluster: &str, more: &[&str]) -> (Plan, Simulation) {
    let settings = [
        format!("sharding.ranks={ranks}"),
        format!("target.cluster={cluster}"),
        "target.device=cuda".to_string(),
    ];
    let settings: Vec<&str> =
        settings.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let plan = predict_llama(binds, &settings);
    let simulation = simulate(&plan, &Cluster::named(cluster).unwrap());
    (plan, simulation)
}

/// Milliseconds of exposed communication with `pre` and with `auto`.
struct Exposed {
    ranks: usize,
    pre: f64,
    auto: f64,
}

/// Compares the two on these numbers of H100 GPUs; with the plans for the first.
fn compare(binds: &str, numbers: &[usize], more: &[&str]) -> (Vec<Exposed>, [Plan; 2]) {
    let (mut all, mut plans) = (Vec::new(), None);
    for &ranks in numbers {
        let of = |prefetch: &str| llama(binds, ranks, "h100", &[&[prefetch], more].concat());
        let (pre_plan, pre) = of("sharding.prefetch=fixed");
        let (auto_plan, auto) = of("sharding.prefetch=auto");
        let what = format!("{binds} on {ranks}: {} and {} s", auto.step_seconds, pre.step_seconds);
        assert!(auto.step_seconds < pre.step_seconds, "{what}");
        assert!(auto.fits, "{what}: {} bytes", auto.peak_bytes);
        let ms = |s: &Simulation| 1e3 * s.exposed_communication_seconds;
        let exposed = Exposed { ranks, pre: ms(&pre), auto: ms(&auto) };
        assert!(
            exposed.auto < 0.9 * exposed.pre,
            "{what}: {} and {} ms",
            exposed.auto,
            exposed.pre
        );
        all.push(exposed);
        plans.get_or_insert([pre_plan, auto_plan]);
    }
    (all, plans.expect("one number of GPUs at least"))
}

#[test]
fn it_hides_more_communication_than_pre_for_llama_shapes() {
    let (small, plans) = compare(LLAMA_8B, &[64, 128, 256, 512], &[]);
    let (large, _) = compare(SHORT, &[64, 512], &["memory.recompute=unit"]);
    // With more tokens all but the edges of a step is hidden either way.
    let of = |prefetch| llama(LLAMA_70B, 64, "h100", &[prefetch, "memory.recompute=unit"]).1;
    let (pre, auto) = (of("sharding.prefetch=fixed"), of("sharding.prefetch=auto"));
    assert!(auto.step_seconds < pre.step_seconds);
    assert!(pre.exposed_communication_seconds < 0.01 * pre.step_seconds);
    let lines = |name: &str, all: &[Exposed]| -> Vec<Line> {
        let line = |prefetch: &str, ms: fn(&Exposed) -> f64| Line {
            name: format!("{name}, {prefetch}"),
            points: all.iter().map(|e| (e.ranks as f64, ms(e))).collect(),
        };
        vec![line("pre", |e| e.pre), line("auto", |e| e.auto)]
    };
    let lines = [lines("Llama 3 8B", &small), lines("Llama 3 70B", &large)].concat();
    figures::keep("exposed.svg", &figures::lines("exposed communication of a step, ms", &lines));
    figures::keep("memory.svg", &figures::memory(&plans.map(|p| (p.live(), p.persistent_bytes))));
}

#[test]
fn units_stay_gathered_as_far_as_the_budget_goes() {
    let small = "batch=1 layers=8 width=2048 heads=16 kv_heads=8 ffn=8192 vocab=32000 seq=1024";
    let auto =
        |more: &[&str]| llama(small, 64, "h100", &[&["sharding.prefetch=auto"], more].concat());
    let (usual, _) = llama(small, 64, "h100", &[]);
    let (roomy, fast) = auto(&[]);
    assert!(gathers(&roomy, Region::Backward) < gathers(&usual, Region::Backward));
    let budget = usual.summary().peak_bytes as u64 * 11 / 10;
    let (tight, slow) = auto(&[&format!("memory.budget={budget}")]);
    assert!(slow.peak_bytes <= budget, "{} of {budget}", slow.peak_bytes);
    assert!(gathers(&tight, Region::Backward) > gathers(&roomy, Region::Backward));
    assert!(fast.step_seconds <= slow.step_seconds);
}

#[test]
fn small_collectives_become_one() {
    let small = "batch=1 layers=8 width=2048 heads=16 kv_heads=8 ffn=8192 vocab=32000 seq=1024";
    let (usual, _) = llama(small, 512, "h100", &[]);
    let (auto, _) = llama(small, 512, "h100", &["sharding.prefetch=auto"]);
    assert!(auto.units.iter().any(|u| u.name == small::NAME));
    let counts = |plan: &Plan| plan.summary().collectives;
    // Norm weights are gathered in f32, matmul weights in bf16: two collectives for every block.
    assert!(counts(&auto).reduce_scatter + 7 <= counts(&usual).reduce_scatter);
    assert!(auto.params.len() == usual.params.len() && auto.units.len() == usual.units.len() + 1);
}

#[test]
fn what_it_changes_is_no_number() {
    for (model, more) in [("gpt2", "precision.compute=fp32"), ("llama", "precision.compute=bf16")] {
        let losses = |prefetch: &str| -> Vec<u64> {
            let settings = [
                "sharding.ranks=4",
                "optimizer.clip_grad_norm=0",
                "target.cluster=h100",
                "run.accumulation=2",
                prefetch,
                more,
            ];
            let planned = plan(&format!("tests/models/{model}/model.onnx"), 2, &settings);
            if prefetch.ends_with("auto") {
                assert_eq!(gathers(&planned.compiled.plan, Region::Backward), 0, "{model}");
            }
            let report =
                train(&planned, &format!("tests/models/{model}/data.safetensors"), 4, false);
            report.losses.iter().map(|x| x.to_bits()).collect()
        };
        assert_eq!(losses("sharding.prefetch=auto"), losses("sharding.prefetch=fixed"), "{model}");
    }
}
