//! `frit simulate` on plans of realistic shapes and of the test models.

use crate::support::{file, plan};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Request, predict, reference};
use frit::config::Config;
use frit_ir::plan::{Action, PhaseName, Plan, Stream, Task};
use frit_passes::cost::Cluster;
use frit_passes::simulate::{simulate, trace};
use serde_json::Value;
use std::collections::BTreeMap;

/// A plan of the example's Llama with these sizes, for predictions.
pub(crate) fn predict_llama(binds: &str, settings: &[&str]) -> Plan {
    predict_model("examples/llama/model.json", binds, settings)
}

/// A plan of a model of these sizes, for predictions.
pub(crate) fn predict_model(model: &str, binds: &str, settings: &[&str]) -> Plan {
    let (request, config) = request(model, binds, settings);
    predict(&request, &config).unwrap_or_else(|e| panic!("{e}"))
}

/// The reference plan of a model of these sizes, for predictions of PyTorch.
pub(crate) fn reference_model(model: &str, binds: &str, settings: &[&str]) -> Plan {
    let (request, config) = request(model, binds, settings);
    reference(&request, &config).unwrap_or_else(|e| panic!("{e}"))
}

/// What compiles a model of these sizes.
pub(crate) fn request(model: &str, binds: &str, settings: &[&str]) -> (Request, Config) {
    let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
    let config = Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
    let bind = |text: &str| {
        let (name, size) = text.split_once('=').expect("a bind");
        (name.to_string(), size.parse().expect("a size"))
    };
    let request = Request {
        model: file(model),
        binds: binds.split(' ').map(bind).collect::<BTreeMap<_, _>>(),
        ..Request::default()
    };
    (request, config)
}

pub(crate) fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

#[test]
fn the_command_gives_stable_keys_and_a_trace() {
    let planned = plan("tests/models/gpt2/model.onnx", 2, &["sharding.ranks=4"]);
    let path = planned.path();
    let trace = planned.dir.path().join("trace.json");
    let args = ["simulate", path.to_str().unwrap(), "--cluster", "h100"];
    let more = ["--json", "--trace", trace.to_str().unwrap()];
    let json: Value = serde_json::from_str(&frit(&[&args[..], &more].concat()).unwrap()).unwrap();
    for key in [
        "step_seconds",
        "compute_seconds",
        "exposed_communication_seconds",
        "peak_bytes",
        "tokens_or_examples_per_s",
        "mfu",
    ] {
        assert!(json[key].as_f64().is_some_and(|x| x > 0.0), "{key} is {}", json[key]);
    }
    let sum =
        ["compute_seconds", "exposed_communication_seconds"].map(|k| json[k].as_f64().unwrap());
    assert!((sum[0] + sum[1] - json["step_seconds"].as_f64().unwrap()).abs() < 1e-9);
    assert_eq!(json["peak_bytes"], planned.compiled.plan.summary().peak_bytes);
    let events: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let tasks = events.iter().filter(|e| e["ph"] == "X").count();
    assert_eq!(tasks, planned.compiled.plan.tasks.len());
    assert!(frit(&args).unwrap().contains("bound by"));
}

#[test]
fn clusters_come_from_files_and_what_is_wrong_with_one_is_said() {
    let planned = plan("tests/models/mlp/model.onnx", 4, &["sharding.ranks=2"]);
    let path = planned.path();
    let run =
        |cluster: &str| frit(&["simulate", path.to_str().unwrap(), "--cluster", cluster, "--json"]);
    let file = |text: &str| {
        let path = planned.dir.path().join("cluster.toml");
        std::fs::write(&path, text).unwrap();
        run(path.to_str().unwrap())
    };
    let seconds = |json: String| -> f64 {
        serde_json::from_str::<Value>(&json).unwrap()["step_seconds"].as_f64().unwrap()
    };
    let builtin = seconds(run("h100").unwrap());
    assert_eq!(seconds(file("base = \"h100\"\nname = \"mine\"\n").unwrap()), builtin);
    assert!(seconds(file("base = \"h100\"\ncollective_us = 6000\n").unwrap()) > 2.0 * builtin);
    let convolutions = |rate: &str| {
        file(&format!("base = \"h100-alone\"\ndevice.convolutions.half_tflops = {rate}\n"))
    };
    assert_eq!(seconds(convolutions("148").unwrap()), seconds(run("h100-alone").unwrap()));
    assert!(convolutions("[[64, 100.0], [256, 150.0]]").is_ok());
    assert!(convolutions("\"fast\"").unwrap_err().contains("a list of pairs"));
    assert!(convolutions("[[64, 0.0]]").unwrap_err().contains("sizes that ascend"));
    assert!(run("no-such-cluster").unwrap_err().contains("a100-80g"));
    assert!(file("base = \"h101\"\n").unwrap_err().contains("h101"));
    assert!(file("base = \"h100\"\nspeed = 3\n").unwrap_err().contains("speed"));
    assert!(file("base = \"h100\"\nintra.gb_per_s = -1\n").unwrap_err().contains("intra.gb_per_s"));
    assert!(file("name = \"empty\"\n").unwrap_err().contains("missing field"));
    assert!(file("name = \n").is_err());
}

#[test]
fn a_calibration_is_a_cluster_of_this_machine_for_plans_of_the_cpu() {
    let planned = plan("tests/models/gpt2/model.onnx", 2, &["target.device=cpu"]);
    let file = planned.dir.path().join("cpu.toml");
    let (plan, file) = (planned.path(), file.to_str().unwrap().to_string());
    let measure = ["calibrate", "--threads", "1", "-o", &file];
    let found: Value =
        serde_json::from_str(&frit(&[&measure[..], &["--json"]].concat()).unwrap()).unwrap();
    for key in [
        "f32_flops",
        "multiply_add_flops",
        "bf16_flops",
        "bytes_per_second",
        "gemm_f32_flops",
        "gemm_bf16_flops",
        "conv_strided_bf16_flops",
    ] {
        assert!(found[key].as_f64().is_some_and(|rate| rate > 1e6), "{key} is {}", found[key]);
    }
    for key in [
        "narrow_f32_flops",
        "narrow_bf16_flops",
        "conv_f32_flops",
        "conv_3x3_f32_flops",
        "conv_bf16_flops",
        "conv_depthwise_f32_flops",
    ] {
        let points = found[key].as_array().unwrap();
        assert!(points.len() >= 3, "{key}");
        assert!(points.iter().all(|p| p[0].is_u64() && p[1].as_f64().unwrap() > 1e6), "{key}");
    }
    assert_eq!(found["threads"], 1);
    let simulate = ["simulate", plan.to_str().unwrap(), "--cluster", &file, "--json"];
    let step: Value = serde_json::from_str(&frit(&simulate).unwrap()).unwrap();
    assert!(step["step_seconds"].as_f64().unwrap() > 0.0 && step["cluster"] == "cpu", "{step}");
    // No model computes faster than the peak.
    assert!(step["mfu"].as_f64().unwrap() <= 1.0, "{step}");
    let settings = [format!("target.cluster={file}")];
    crate::support::plan(
        "tests/models/mlp/model.onnx",
        4,
        &settings.each_ref().map(|s| s.as_str()),
    );
    assert!(frit(&["calibrate", "--threads", "0"]).unwrap_err().contains("--threads"));
    let nowhere = frit(&["calibrate", "--threads", "1", "-o", "/no/such/folder/cpu.toml"]);
    assert!(nowhere.unwrap_err().contains("cannot write /no/such/folder"));
}

#[test]
fn simulation_is_deterministic_and_covers_many_ranks() {
    let h100 = Cluster::named("h100").unwrap();
    let small = "batch=1 layers=2 width=1024 heads=8 kv_heads=8 ffn=4096 vocab=32000 seq=1024";
    let mut before = 0.0;
    for ranks in [8, 512, 16384] {
        let plan = predict_llama(small, &[&format!("sharding.ranks={ranks}")]);
        let (a, b) = (simulate(&plan, &h100), simulate(&plan, &h100));
        assert_eq!(a, b);
        assert_eq!(trace::to_json(&a), trace::to_json(&b));
        assert!(a.step_seconds > before, "{ranks} ranks take {}", a.step_seconds);
        before = a.step_seconds;
        assert!(a.mfu > 0.0 && a.mfu < 1.0);
        let whole: f64 = a.bounds.iter().map(|b| b.fraction).sum();
        assert!((whole - 1.0).abs() < 1e-6, "the critical path is {whole} of the step");
    }
}

#[test]
fn accumulation_repeats_the_micro_step_only() {
    let h100 = Cluster::named("h100").unwrap();
    let small = "batch=1 layers=2 width=1024 heads=8 kv_heads=8 ffn=4096 vocab=32000 seq=1024";
    let step = |accumulation: usize| {
        let key = format!("run.accumulation={accumulation}");
        simulate(&predict_llama(small, &["sharding.ranks=8", &key]), &h100)
    };
    let (one, four) = (step(2), step(8));
    let micro = one.phases[0].timeline.end;
    assert!((four.step_seconds - one.step_seconds - 6.0 * micro).abs() < 1e-9);
    assert_eq!(four.model_flops, 4 * one.model_flops);
}

#[test]
fn automatic_prefetching_is_never_slower_than_pre_and_hides_more_where_it_can() {
    let sizes = "batch=1 layers=8 width=4096 heads=32 kv_heads=8 ffn=14336 vocab=32000 seq=1024";
    for (cluster, ranks) in [("h100", 64), ("a100-80g", 64), ("h100", 512)] {
        let model = Cluster::named(cluster).unwrap();
        let step = |prefetch: &str| {
            let settings = [
                format!("sharding.ranks={ranks}"),
                format!("sharding.prefetch={prefetch}"),
                format!("target.cluster={cluster}"),
            ];
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            simulate(&predict_llama(sizes, &settings), &model)
        };
        let (fixed, auto) = (step("fixed"), step("auto"));
        assert!(auto.step_seconds <= fixed.step_seconds, "{cluster} {ranks}");
        assert!(auto.exposed_communication_seconds <= fixed.exposed_communication_seconds + 1e-9);
    }
}

#[test]
fn reductions_begin_while_backward_computes() {
    let sizes = "batch=1 layers=6 width=1024 heads=8 kv_heads=8 ffn=4096 vocab=32000 seq=1024";
    let plan = predict_llama(sizes, &["sharding.ranks=8"]);
    let is_reduction = |t: &Task| matches!(t.action, Action::ReduceScatter { .. });
    let compute = |t: &Task| t.stream == Stream::Compute;
    let micro = plan.phase(PhaseName::MicroStep).unwrap();
    let tasks = &plan.tasks.raw[micro.begin.0..micro.end.0];
    let reductions: Vec<usize> = (0..tasks.len()).filter(|i| is_reduction(&tasks[*i])).collect();
    assert!(reductions.len() >= 6);
    // Between two reductions of different blocks there is work to hide them behind.
    let hidden =
        reductions.iter().filter(|&&i| tasks[i..].iter().filter(|t| compute(t)).count() > 8);
    assert!(hidden.count() >= 5, "{reductions:?} of {}", tasks.len());
}

#[test]
fn a_search_prints_plans_that_fit_the_best_first() {
    let model = file("examples/llama/model.json");
    let small =
        ["layers=4", "width=1024", "heads=8", "kv_heads=8", "ffn=4096", "vocab=32000", "seq=1024"];
    let mut args =
        vec!["plan-search", model.to_str().unwrap(), "--cluster", "h100", "--ranks", "16"];
    small.iter().for_each(|bind| args.extend(["--bind", bind]));
    args.extend(["--micro-batch", "1,4", "--strategy", "full_shard,no_shard"]);
    let found: Value =
        serde_json::from_str(&frit(&[&args[..], &["--json"]].concat()).unwrap()).unwrap();
    let found = found.as_array().unwrap();
    assert!(!found.is_empty() && found.len() <= 5);
    let rate = |v: &Value| v["tokens_or_examples_per_s"].as_f64().unwrap();
    assert!(found.windows(2).all(|pair| rate(&pair[0]) >= rate(&pair[1])));
    assert_eq!(found[0]["micro_batch"], 4);
    // Less memory forces other choices; none is an error that says what would do.
    let peak = found[0]["peak_bytes"].as_u64().unwrap();
    let tight = format!("{}", peak / 2);
    let text = frit(&[&args[..], &["--json", "--budget", &tight]].concat()).unwrap();
    let other: Value = serde_json::from_str(&text).unwrap();
    assert!(other[0]["peak_bytes"].as_u64().unwrap() <= peak / 2);
    let refused = frit(&[&args[..], &["--budget", "1000"]].concat()).unwrap_err();
    assert!(refused.contains("the smallest one needs"), "{refused}");
    let missing = ["plan-search", "no.json", "--cluster", "h100", "--ranks", "2"];
    assert!(frit(&missing).unwrap_err().contains("no.json"));
}
