//! Lints of whole compilations, and the mistakes of mixed precision that a plan cannot contain.

use crate::support::{Planned, file, plan, plan_at, plan_to_evaluate, train_on, write_f32};
use clap::Parser;
use frit::commands::{Cli, execute};
use frit::compilation::{Request, compile};
use frit::config::Config;
use frit_ir::plan::{Action, KernelId, ParamId, PhaseId, Plan};
use frit_ir::{DType, Op, Region, Severity, TensorType, text};
use frit_passes::cost::{Cluster, Device};
use frit_passes::lint;
use frit_passes::verify_plan::verify_plan;
use std::collections::BTreeMap;
use std::path::Path;

fn frit(args: &[&str]) -> Result<String, String> {
    let cli = Cli::try_parse_from([&["frit"], args].concat()).map_err(|e| e.to_string())?;
    execute(&cli).map_err(|report| report.to_string())
}

/// A linear layer of `k` terms with an operation on its result, and another layer, as a JSON model.
fn linear(dir: &Path, k: usize, then: &str, settings: &[&str]) -> Planned {
    let model = format!(
        r#"{{ "frit_model": 1, "name": "linear", "dims": {{ "batch": null }},
  "inputs": [ {{ "name": "x", "dtype": "f32", "shape": ["batch", {k}] }} ],
  "params": [ {{ "name": "w", "shape": [{k}, 64], "init": {{ "uniform": {{ "bound": 1.0 }} }} }},
              {{ "name": "v", "shape": [64, 64], "init": {{ "uniform": {{ "bound": 1.0 }} }} }} ],
  "nodes": [ {{ "op": "matmul", "inputs": ["x", "w"], "outputs": ["h"], "scope": "fc" }},
             {{ "op": "relu", "inputs": ["h"], "outputs": ["a"] }},
             {{ "op": "matmul", "inputs": ["a", "v"], "outputs": ["b"], "scope": "head" }},
             {{ "op": "{then}", "inputs": ["b"], "outputs": ["y"] }} ],
  "outputs": ["y"] }}"#
    );
    let path = dir.join("model.json");
    std::fs::write(&path, model).expect("written");
    plan_at(&path, 8, &[&["loss.logits=y"], settings].concat())
}

const BCE: [&str; 1] = ["loss.kind=bce_with_logits"];

fn ids(plan: &Plan) -> Vec<&str> {
    plan.lints.iter().map(|d| d.code.as_str()).collect()
}

#[test]
fn an_error_refuses_the_plan_unless_it_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let (out_text, model) = (out.to_str().unwrap(), file("tests/models/mlp/model.onnx"));
    let compile = [
        "compile",
        model.to_str().unwrap(),
        "--bind",
        "batch=4",
        "--set",
        "precision.compute=fp16",
        "--set",
        "precision.loss_scale=none",
        "-o",
        out_text,
    ];
    let message = frit(&compile).unwrap_err();
    assert!(message.contains("not scaled") && message.contains("--allow L02"), "{message}");
    assert!(!out.exists(), "a refused plan was written");
    frit(&[&compile[..], &["--allow", "L02"]].concat()).unwrap();
    let lints = frit(&["inspect", out_text, "--view", "lints", "--json"]).unwrap();
    let lints: serde_json::Value = serde_json::from_str(&lints).unwrap();
    let found = lints.as_array().unwrap().iter().find(|l| l["id"] == "L02").expect("L02");
    let mut keys: Vec<&str> = found.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["id", "message", "remedy", "scope", "severity"]);
    assert_eq!(found["severity"], "info", "allowed");
    let text = frit(&["inspect", out_text, "--view", "lints"]).unwrap();
    assert!(text.contains("L02") && text.contains("loss_scale"), "{text}");
    let message = frit(&[&compile[..], &["--allow", "L99"]].concat()).unwrap_err();
    assert!(message.contains("L99"), "{message}");
}

#[test]
fn declared_ranges_and_weights_bound_matmuls_in_f16() {
    let dir = tempfile::tempdir().unwrap();
    let with = |range: &str, compute: &str| {
        let range = format!("data.ranges=[\"x={range}\"]");
        let settings = ["loss.kind=mse", &range, compute];
        let planned = linear(dir.path(), 256, "tanh", &settings);
        planned.compiled.plan.lints.into_iter().find(|d| d.code == "L19")
    };
    let found = with("-2000..2000", "precision.compute=fp16").expect("L19");
    assert_eq!((&*found.origin.scope, found.severity), ("fc", Severity::Warning));
    assert!(with("-1..1", "precision.compute=fp16").is_none());
    assert!(with("-2000..2000", "precision.compute=bf16").is_none());
    let model = dir.path().join("model.json");
    let message = frit(&[
        "compile",
        model.to_str().unwrap(),
        "--bind",
        "batch=4",
        "--set",
        "data.ranges=[\"z=0..1\"]",
        "--set",
        "loss.logits=y",
        "--set",
        "loss.kind=mse",
    ]);
    assert!(message.unwrap_err().contains("not an input of the model"));
}

#[test]
fn probabilities_in_a_loss_of_logits() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ids(&linear(dir.path(), 64, "sigmoid", &BCE).compiled.plan).contains(&"L20"));
    assert!(!ids(&linear(dir.path(), 64, "tanh", &BCE).compiled.plan).contains(&"L20"));
}

#[test]
fn unaligned_matmuls_are_noted_with_the_padding_that_aligns_them() {
    let dir = tempfile::tempdir().unwrap();
    let plan = linear(dir.path(), 253, "tanh", &BCE).compiled.plan;
    let found = plan.lints.iter().find(|d| d.code == "L23").expect("L23");
    assert_eq!(found.severity, Severity::Info);
    assert!(found.message.contains("K 253 to 256"), "{}", found.message);
    assert!(found.message.contains("% more arithmetic, predicted gain"), "{}", found.message);
    assert!(!ids(&linear(dir.path(), 256, "tanh", &BCE).compiled.plan).contains(&"L23"));
}

/// On a GPU the head of GPT-2 is padded to whole lines; its table keeps its logical shape.
#[test]
fn the_vocabulary_is_padded_where_it_pays() {
    let dir = tempfile::tempdir().unwrap();
    let model = r#"{ "frit_model": 1, "name": "head", "dims": { "batch": null },
  "inputs": [ { "name": "ids", "dtype": "i64", "shape": ["batch", 1024] } ],
  "params": [ { "name": "wte", "shape": [50257, 768], "init": { "normal": { "std": 0.02 } } } ],
  "nodes": [ { "op": "embedding", "inputs": ["wte", "ids"], "outputs": ["h"] },
             { "op": "matmul", "inputs": ["h", "wte"], "outputs": ["logits"], "attrs": { "trans_b": true } } ],
  "outputs": ["logits"] }"#;
    let path = dir.path().join("model.json");
    std::fs::write(&path, model).expect("written");
    let compiled = |settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(|s| s.to_string()).collect();
        let config = Config::load(None, &settings).unwrap_or_else(|e| panic!("{e}"));
        let binds = [("batch".to_string(), 8)].into();
        let request = Request { model: path.clone(), binds, ..Request::default() };
        let compiled = compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{e}"));
        compiled.expect("a plan").plan
    };
    let padded = |plan: &Plan| {
        let report = plan.reports.iter().find(|r| r.pass == "pad_tensor_cores").expect("it ran");
        report.remarks.iter().any(|(text, _)| text.contains("N 50257 to 50304"))
    };
    let gpu = compiled(&["target.device=cuda", "target.arch=sm_90"]);
    assert!(padded(&gpu), "{:?}", gpu.reports);
    assert_eq!(gpu.params[ParamId(0)].ty.shape.dims(), [50257, 768]);
    let lint = gpu.lints.iter().find(|d| d.code == "L23").expect("L23");
    assert!(
        lint.message.starts_with("padded:") && lint.message.contains("0.1 % more"),
        "{}",
        lint.message
    );
    assert!(!padded(&compiled(&[
        "target.device=cuda",
        "target.arch=sm_90",
        "padding.tensor_cores=never"
    ])));
    assert!(!padded(&compiled(&[])));
}

#[test]
fn a_tiny_model_gains_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut plan = linear(dir.path(), 8, "tanh", &BCE).compiled.plan;
    assert!(ids(&plan).contains(&"L16"), "{:?}", ids(&plan));
    // The same tasks where nothing but arithmetic takes time.
    let cpu = Device::cpu("+avx512f");
    let large = |plan: &mut Plan| {
        let body = "graph @kernel world=1 {
  %0: bf16[4096, 4096] = input {name = \"0\", ty = {\"dtype\": \"bf16\", \"shape\": [4096, 4096]}}
  %1: bf16[4096, 4096] = matmul %0, %0
  return %1 as \"0\"
}";
        plan.kernels[KernelId(0)].body = text::parse(body).expect("parses");
    };
    assert_eq!(lint::plan(&plan, &cpu, false).len(), 1);
    large(&mut plan);
    let found = lint::plan(&plan, &cpu, false);
    assert!(found.is_empty(), "{found:?}");
}

/// Labels that are the tokens of their own place are warned of if the logits of a place see no token behind it: of causal models, and of no
/// others.
#[test]
fn models_whose_logits_see_no_token_behind_them_are_known() {
    let behind = |model: &str, batch: usize| {
        let plan = plan(model, batch, &["loss.kind=cross_entropy"]).compiled.plan;
        let labels = plan.inputs.iter().flat_map(|input| &input.ranges);
        labels.flat_map(|range| range.causal.clone()).collect::<Vec<_>>()
    };
    for model in ["gpt2", "llama", "opt", "gpt2/model_sdpa.onnx"] {
        let file =
            if model.ends_with("onnx") { model.into() } else { format!("{model}/model.onnx") };
        assert_eq!(behind(&format!("tests/models/{file}"), 2), ["input_ids"], "{model}");
    }
    assert_eq!(behind("tests/museum/models/lm.json", 2), ["input_ids"]);
    for model in ["bert", "t5"] {
        let found = behind(&format!("tests/models/{model}/model.onnx"), 2);
        assert!(!found.contains(&"input_ids".to_string()), "{model}: {found:?}");
    }
}

/// Plans of language models do not cast there and back; one that does is found.
#[test]
fn casts_there_and_back() {
    let models = [
        ("gpt2", "cross_entropy"),
        ("t5", "cross_entropy"),
        ("llama", "cross_entropy"),
        ("bert", "cross_entropy"),
        ("vit", "cross_entropy"),
        ("mlp", "cross_entropy"),
        ("resnet", "cross_entropy"),
        ("unet", "mse"),
    ];
    for (model, loss) in models {
        for compute in ["bf16", "fp16", "bf16-pure"] {
            let compute = format!("precision.compute={compute}");
            let path = format!("tests/models/{model}/model.onnx");
            let loss = format!("loss.kind={loss}");
            let mut settings = vec![compute.as_str(), &loss];
            settings.extend((model == "resnet").then_some("model.batch_norm=train"));
            let plan = plan(&path, 4, &settings).compiled.plan;
            let found: Vec<_> = plan.lints.iter().filter(|d| d.code == "L24").collect();
            assert!(found.is_empty(), "{model}, {compute}: {found:?}");
        }
    }
    let mut broken = plan("tests/models/mlp/model.onnx", 4, &[]).compiled.plan;
    let one_read = |p: &Plan| {
        p.tasks.iter().find_map(|t| match &t.action {
            Action::Kernel { kernel, reads, writes } if reads.len() == 1 && writes.len() == 1 => {
                Some(*kernel)
            }
            _ => None,
        })
    };
    let kernel = one_read(&broken).expect("a kernel of one operand");
    let body = "graph @kernel world=1 {
  %0: bf16[4] = input {name = \"0\", ty = {\"dtype\": \"bf16\", \"shape\": [4]}}
  %1: f32[4] = cast %0 {to = \"f32\"}
  %2: f32[2, 2] = reshape %1 {shape = [2, 2]}
  %3: bf16[2, 2] = cast %2 {to = \"bf16\"}
  return %3 as \"0\"
}";
    let mut finds_if = |pure: bool, body: &str| {
        broken.kernels[kernel].body = text::parse(body).expect("parses");
        let found = lint::plan(&broken, &Cluster::of(&broken.target).device, pure);
        found.iter().any(|d| d.code == "L24")
    };
    // Widening and going back loses nothing, so it is for nothing in any precision.
    assert!(finds_if(true, body));
    let mut finds = |body: &str| finds_if(false, body);
    assert!(finds(body));
    // Rounded and widened again for nothing, but not where something reads the rounded value.
    let (f32_in, other) = (body.replace("bf16[4] = input", "f32[4] = input"), "%2 as \"1\"");
    let rounded = f32_in
        .replace("{\"dtype\": \"bf16\"", "{\"dtype\": \"f32\"")
        .replace("%1: f32[4] = cast %0 {to = \"f32\"}", "%1: bf16[4] = cast %0 {to = \"bf16\"}")
        .replace("%2: f32[2, 2]", "%2: bf16[2, 2]")
        .replace(
            "%3: bf16[2, 2] = cast %2 {to = \"bf16\"}",
            "%3: f32[2, 2] = cast %2 {to = \"f32\"}",
        );
    assert!(finds(&rounded));
    assert!(!finds(&rounded.replace("\n}", &format!("\n  return {other}\n}}"))));
    // Where every value is stated to be rounded, rounding is not for nothing.
    assert!(!finds_if(true, &rounded));
}

/// L01, L05, L06, L07 are broken by hand in `broken_plans`; here is what they leave over.
#[test]
fn state_changes_once_and_by_the_checked_flag() {
    let plan =
        plan("tests/models/mlp/model.onnx", 4, &["precision.compute=fp16", "run.accumulation=2"]);
    let plan = plan.compiled.plan;
    verify_plan(&plan).expect("sound");
    let task = |plan: &Plan, op: &str| {
        let holds = |k: KernelId| plan.kernels[k].body.nodes().any(|(_, n)| n.op.name() == op);
        let is = |a: &Action| matches!(a, Action::Kernel { kernel, .. } if holds(*kernel));
        plan.tasks.position(|t| is(&t.action)).expect("a task")
    };
    let codes = |plan: &Plan| -> Vec<String> {
        verify_plan(plan).expect_err("broken").into_iter().map(|d| d.code).collect()
    };
    for op in ["update_step", "update_loss_scale"] {
        // L04: another flag than the one that was checked.
        let mut other = plan.clone();
        let i = task(&other, op);
        let unscaled = task(&other, "unscale");
        let flag = other.tasks[unscaled].action.writes()[1].clone();
        let Action::Kernel { reads, .. } = &mut other.tasks[i].action else { unreachable!() };
        let wrong = reads.iter().find(|r| **r != flag).cloned().expect("another operand");
        reads.iter_mut().filter(|r| **r == flag).for_each(|r| *r = wrong.clone());
        assert!(codes(&other).contains(&"P313".to_string()), "{op}");
        // L05: within the part of the step that accumulation repeats.
        let mut repeated = plan.clone();
        repeated.phases[PhaseId(0)].end = i.next();
        repeated.phases[PhaseId(1)].begin = i.next();
        assert!(codes(&repeated).contains(&"P313".to_string()), "{op} in the micro-step");
    }
}

/// L08: the loss, its scale and all scaler state are f32, and the rules of the operations keep them so.
#[test]
fn loss_and_scale_are_f32() {
    let half = TensorType::scalar(DType::F16);
    let scale = Op::LossScale(frit_ir::ops::LossScale { factor: 1.0 });
    assert!(scale.infer(&[&half]).is_err());
    assert!(Op::UpdateStep.infer(&[&half, &half]).is_err());
    for model in ["mlp", "gpt2"] {
        let path = format!("tests/models/{model}/model.onnx");
        let plan = plan(&path, 2, &["precision.compute=fp16"]).compiled.plan;
        let scalars = ["loss", "loss_scale"];
        let metrics = plan.metrics.iter().filter(|m| scalars.contains(&m.name.word()));
        let dtypes: Vec<DType> = metrics.map(|m| m.place.ty.dtype).collect();
        assert_eq!(dtypes, [DType::F32; 2]);
    }
}

/// L09: a skipped step exchanges exactly what a taken one does.
#[test]
fn a_skipped_step_runs_the_same_collectives() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["loss.kind=mse", "precision.compute=fp16", "sharding.ranks=2"];
    let planned = linear(dir.path(), 64, "tanh", &settings);
    let exchanged = |x: f32| {
        let mut values = vec![0.01; 16 * 64];
        values[5] = x;
        let path = dir.path().join("data.safetensors");
        let labels = vec![0.0; 16 * 64];
        write_f32(&path, &[("x", vec![16, 64], values), ("labels", vec![16, 64], labels)]);
        let metrics = dir.path().join(format!("{x}.jsonl"));
        let report = train_on(&planned, &path, 1, Some(metrics.clone()));
        let skipped = std::fs::read_to_string(metrics).unwrap().contains("\"skipped\":true");
        (skipped, report.collective_calls, report.collective_bytes)
    };
    let (taken, overflow) = (exchanged(0.02), exchanged(1e6));
    assert_eq!((taken.0, overflow.0), (false, true));
    assert_eq!((taken.1, taken.2), (overflow.1, overflow.2));
    assert!(taken.1 > 0);
}

/// L14: a model stored in bf16 trains in f32 and is noted; the cast back is the model's own dtype.
#[test]
fn initializers_in_low_precision_get_masters() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    std::fs::write(&path, bf16_linear(4, 2)).expect("written");
    let settings = ["loss.kind=mse", "loss.logits=y"];
    let plan = plan_at(&path, 2, &settings).compiled.plan;
    assert!(ids(&plan).contains(&"L14"), "{:?}", ids(&plan));
    let weight = plan.params.iter().find(|p| p.name == "w").expect("the parameter");
    assert_eq!(weight.ty.dtype, DType::F32);
    let mlp = crate::support::plan("tests/models/mlp/model.onnx", 4, &[]).compiled.plan;
    assert!(!ids(&mlp).contains(&"L14"));
}

/// `y[batch, n] = x[batch, k] · w`, all of it bf16, as ONNX.
fn bf16_linear(k: i64, n: i64) -> Vec<u8> {
    use frit::import::onnx::messages::*;
    const BF16: i32 = 16;
    let value = |name: &str, columns: i64| {
        let batch = DimensionProto { dim_value: None, dim_param: Some("batch".into()) };
        let columns = DimensionProto { dim_value: Some(columns), dim_param: None };
        let shape = Some(TensorShapeProto { dim: vec![batch, columns] });
        let tensor_type = Some(TensorTypeProto { elem_type: BF16, shape });
        ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }) }
    };
    let ones = half_one().repeat((k * n) as usize);
    let weight = TensorProto {
        name: "w".into(),
        dims: vec![k, n],
        data_type: BF16,
        raw_data: Some(ones.into()),
        ..Default::default()
    };
    let node = NodeProto {
        input: vec!["x".into(), "w".into()],
        output: vec!["y".into()],
        name: "fc".into(),
        op_type: "MatMul".into(),
        ..Default::default()
    };
    let graph = GraphProto {
        name: "linear".into(),
        input: vec![value("x", k)],
        initializer: vec![weight],
        node: vec![node],
        output: vec![value("y", n)],
        ..Default::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 18 }];
    let model =
        ModelProto { ir_version: 8, graph: Some(graph), opset_import, ..Default::default() };
    prost::Message::encode_to_vec(&model)
}

/// 1 in bf16.
fn half_one() -> [u8; 2] {
    0x3f80_u16.to_le_bytes()
}

#[test]
fn every_lint_has_its_test() {
    let mut sources = String::new();
    for folder in ["tests/suite", "passes/src/lint", "passes/tests"] {
        for entry in std::fs::read_dir(file(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|e| e == "rs") {
                sources += &std::fs::read_to_string(path).expect("a source");
            }
        }
    }
    for lint in &lint::catalog::LINTS {
        let test = format!("#[test]\nfn {}()", lint.test);
        assert!(sources.contains(&test), "{}: there is no test `{}`", lint.id, lint.test);
    }
}

/// How often a plan runs contractions, attention and norms forward, by operation and operand types.
fn forward_operations(plan: &Plan) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for task in plan.tasks.iter().filter(|t| t.region == Region::Forward) {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let body = &plan.kernels[*kernel].body;
        for (_, node) in body.nodes() {
            let counts = matches!(
                node.op,
                Op::MatMul(_)
                    | Op::Conv(_)
                    | Op::ConvGradInput(_)
                    | Op::Attention(_)
                    | Op::Softmax(_)
                    | Op::LayerNorm(_)
                    | Op::RmsNorm(_)
                    | Op::Quantize(_)
            );
            if counts {
                // The scale of an 8-bit float follows from history in training only.
                let operands = if matches!(node.op, Op::Quantize(_)) { 1 } else { 3 };
                let types: Vec<String> =
                    node.inputs.iter().take(operands).map(|v| body.ty(*v).to_string()).collect();
                *found.entry(format!("{} {}", node.op.name(), types.join(" "))).or_default() += 1;
            }
        }
    }
    found
}

/// L15: each operation of an evaluation reads what it reads in training.
#[test]
fn evaluation_computes_as_training_does() {
    let both = |model: &str, loss: &str, compute: &str| {
        let settings = [format!("precision.compute={compute}"), format!("loss.kind={loss}")];
        let path = format!("tests/models/{model}/model.onnx");
        let planned = plan_to_evaluate(&path, 4, &[&settings[0], &settings[1]]);
        let evaluation = planned.compiled.evaluation.as_ref().expect("an evaluation");
        (forward_operations(&planned.compiled.plan), forward_operations(&evaluation.plan))
    };
    let models = [
        ("gpt2", "cross_entropy"),
        ("t5", "cross_entropy"),
        ("vit", "cross_entropy"),
        ("unet", "mse"),
    ];
    for (model, loss) in models {
        for compute in ["bf16", "fp16", "bf16-pure", "fp8", "fp32"] {
            let (training, evaluation) = both(model, loss, compute);
            assert!(!training.is_empty());
            assert_eq!(training, evaluation, "{model} in {compute}");
        }
    }
    // The comparison sees another precision.
    let gpt2 = |compute: &str| both("gpt2", "cross_entropy", compute);
    assert_ne!(gpt2("bf16").0, gpt2("fp32").1);
    assert_ne!(gpt2("bf16").0, gpt2("fp8").1);
}
