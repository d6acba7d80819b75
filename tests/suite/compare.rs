//! `frit diff` and `frit bench`.

use crate::support::{file, plan};
use clap::Parser;
use frit::commands::{Cli, execute};
use serde_json::Value;

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

const MLP: &str = "tests/models/mlp/model.onnx";

#[test]
fn a_plan_does_not_differ_from_itself() {
    let planned = plan(MLP, 4, &[]);
    let path = planned.path();
    let path = path.to_str().unwrap();
    let found: Value =
        serde_json::from_str(&frit(&["diff", path, path, "--json"]).unwrap()).unwrap();
    for key in ["change", "config", "casts", "collectives"] {
        let empty = found[key]
            .as_array()
            .map_or_else(|| found[key].as_object().is_some_and(|o| o.is_empty()), Vec::is_empty);
        assert!(empty, "{key}: {}", found[key]);
    }
    assert_eq!(found["a"], found["b"]);
}

#[test]
fn precision_and_ranks_show() {
    let a = plan(MLP, 4, &["precision.compute=fp32"]);
    let b = plan(MLP, 4, &["precision.compute=bf16", "sharding.ranks=2"]);
    let (a_path, b_path) = (a.path(), b.path());
    let args = ["diff", a_path.to_str().unwrap(), b_path.to_str().unwrap()];
    let found = frit(&[&args[..], &["--json"]].concat()).unwrap();
    let found: Value = serde_json::from_str(&found).unwrap();
    let (sa, sb) = (a.compiled.plan.summary(), b.compiled.plan.summary());
    assert_eq!(found["change"]["casts"], sb.casts - sa.casts);
    assert_eq!(found["change"]["all_gather"], sb.collectives.all_gather);
    assert_eq!(found["a"]["peak_bytes"], sa.peak_bytes);
    assert_eq!(found["b"]["peak_bytes"], sb.peak_bytes);
    let keys: Vec<&str> =
        found["config"].as_array().unwrap().iter().filter_map(|c| c["key"].as_str()).collect();
    assert_eq!(keys, ["precision.compute", "sharding.ranks"]);
    let casts = found["casts"].as_array().unwrap();
    assert!(casts.iter().all(|c| c["a"] == 0 && c["b"].as_u64() > Some(0)), "{casts:?}");
    let text = frit(&args).unwrap();
    for part in ["precision.compute", "all_gather", "casts", "peak bytes"] {
        assert!(text.contains(part), "`{part}` is not in {text}");
    }
}

#[test]
fn bench_compares_with_fp32() {
    let planned = plan(MLP, 16, &["precision.compute=bf16"]);
    let (path, data) = (planned.path(), file("tests/models/mlp/data.safetensors"));
    let path = path.to_str().unwrap();
    let args = ["bench", path, "--data", data.to_str().unwrap(), "--steps", "2", "--json"];
    let found: Value = serde_json::from_str(&frit(&args).unwrap()).unwrap();
    assert_eq!(found["plan"]["compute_dtype"], "bf16");
    assert_eq!(found["fp32"]["compute_dtype"], "f32");
    assert_eq!(found["fp32"]["casts"], 0);
    assert_eq!(found["plan"]["losses"].as_array().unwrap().len(), 3);
    let deviation = found["loss_deviation"].as_f64().unwrap();
    assert!(deviation > 0.0 && deviation < 0.02, "{deviation}");
    let speedup = found["speedup"].as_f64().unwrap();
    let verdict = found["verdict"].as_str().unwrap();
    assert_eq!(verdict, frit::bench::Verdict::of(speedup).word());
    // Without data, on random numbers.
    let text = frit(&["bench", path, "--steps", "1"]).unwrap();
    assert!(text.contains("speed-up") && text.contains("verdict"), "{text}");
}

#[test]
fn random_token_ids_are_within_the_table() {
    let planned = plan("tests/models/gpt2/model.onnx", 2, &["precision.compute=bf16"]);
    let path = planned.path();
    let text = frit(&["bench", path.to_str().unwrap(), "--steps", "1"]).unwrap();
    assert!(text.contains("verdict"), "{text}");
}

#[test]
fn fp32_has_nothing_to_be_compared_with() {
    let planned = plan(MLP, 4, &["precision.compute=fp32"]);
    let message = frit(&["bench", planned.path().to_str().unwrap()]).unwrap_err();
    assert!(message.contains("already"), "{message}");
}
