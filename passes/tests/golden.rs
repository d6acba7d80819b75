//! Golden tests of passes: `tests/golden/<pass>/<behavior>.frit`.
//!
//! A file has a header `; test pass=<name> key=value …`, a graph, the line `; ==== expected ====` and the graph after
//! the pass. `UPDATE_EXPECT=1 cargo test` rewrites the expected graph. Each test also runs both graphs in the
//! interpreter on random feeds and compares their outputs within the tolerance that the pass declares.

use expect_test::expect_file;
use frit_ir::interpret::{Options, leaf_key, run};
use frit_ir::ops::{Init, ParamKind};
use frit_ir::plan::{DeviceType, Strategy, Target};
use frit_ir::{DType, Graph, Op, Tensor, text};
use frit_passes::adapter::{self, Lora};
use frit_passes::autocast::{Autocast, Override};
use frit_passes::canonicalize::Canonicalize;
use frit_passes::channels_last::ChannelsLast;
use frit_passes::chunk_loss::{ChunkLoss, Chunks};
use frit_passes::cost::Device;
use frit_passes::documents::Documents;
use frit_passes::evaluate::Evaluate;
use frit_passes::fp8::Fp8;
use frit_passes::hold_frozen::HoldFrozen;
use frit_passes::loss::{Loss, LossKind, Term};
use frit_passes::pad_tensor_cores::{PadMode, PadTensorCores};
use frit_passes::raise::Raise;
use frit_passes::shard::{Reshard, Shard, Wrap};
use frit_passes::strip_functions::StripFunctions;
use frit_passes::sync_batch_norm::SyncBatchNorm;
use frit_passes::{Changed, Numerics, Pass, PassContext};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const SEPARATOR: &str = "; ==== expected ====\n";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

struct Header {
    pass: String,
    keys: HashMap<String, String>,
}

impl Header {
    fn parse(text: &str) -> Header {
        let line = text.lines().next().unwrap_or_default();
        let words = line.strip_prefix("; test ").expect("the first line is `; test pass=…`");
        let mut keys: HashMap<String, String> = words
            .split_whitespace()
            .map(|word| word.split_once('=').expect("key=value"))
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        Header { pass: keys.remove("pass").expect("pass=…"), keys }
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    fn dtype(&self, key: &str) -> Option<DType> {
        self.get(key).map(|name| name.parse().expect("a dtype"))
    }

    /// The losses that the keys declare.
    fn terms(&self) -> Vec<Term> {
        let number = |key: &str| self.get(key).map(|n| n.parse().expect("a number"));
        let term = Term {
            kind: match self.get("kind") {
                Some("mse") => LossKind::Mse,
                Some("l1") => LossKind::L1,
                Some("smooth_l1") => LossKind::SmoothL1,
                Some("bce_with_logits") => LossKind::BceWithLogits,
                Some("kl") => LossKind::Kl,
                Some("output") => LossKind::Output,
                Some("none") => LossKind::None,
                _ => LossKind::CrossEntropy,
            },
            logits: self.get("logits").unwrap_or("logits").into(),
            labels: self.get("labels").unwrap_or("labels").into(),
            class_axis: self.get("class_axis").map(|axis| axis.parse().expect("an axis")),
            soft_targets: self.get("soft_targets").is_some(),
            label_smoothing: number("label_smoothing").unwrap_or(0.0),
            weight: number("weight").unwrap_or(1.0),
            ..Term::default()
        };
        let mut terms = vec![term];
        if let Some(output) = self.get("and_mse") {
            let (logits, labels) = (output.into(), "target".into());
            let kind = LossKind::Mse;
            terms.push(Term { kind, logits, labels, weight: 0.25, ..Term::default() });
        }
        terms
    }

    fn build(&self) -> Box<dyn Pass> {
        match self.pass.as_str() {
            "canonicalize" => Box::new(Canonicalize {}),
            "raise" => Box::new(Raise {}),
            "loss" => Box::new(Loss { terms: self.terms(), world_size: 2, reproducible: false }),
            "evaluate" => Box::new(Evaluate { terms: self.terms(), metrics: vec![] }),
            "autocast" => {
                let exception = self.dtype("override").map(|dtype| Override {
                    scope: self.get("scope").map(String::from),
                    op: self.get("op").map(String::from),
                    dtype,
                    output: self.dtype("output"),
                });
                Box::new(Autocast {
                    overrides: exception.into_iter().collect(),
                    pure: self.get("pure").is_some(),
                    narrow_residual: self.get("residual") == Some("compute"),
                    param_dtype: self.dtype("param_dtype"),
                    buffer_dtype: self.dtype("buffer_dtype"),
                    ..Autocast::new(self.dtype("compute").unwrap_or(DType::BF16))
                })
            }
            "channels_last" => Box::new(ChannelsLast {
                target: Target {
                    device: match self.get("device") {
                        Some("cuda") => DeviceType::Cuda,
                        _ => DeviceType::Cpu,
                    },
                    arch: String::new(),
                    features: String::new(),
                },
            }),
            "pad_tensor_cores" => Box::new(PadTensorCores {
                mode: if self.get("mode") == Some("on") { PadMode::Always } else { PadMode::Auto },
                target: Target {
                    device: DeviceType::Cpu,
                    arch: self.get("target").unwrap_or("x86-64-v3").into(),
                    features: String::new(),
                },
                fp8: Fp8 { enabled: self.get("fp8").is_some(), ..Fp8::default() },
            }),
            "sync_batch_norm" => Box::new(SyncBatchNorm {
                ranks: self.get("ranks").map_or(1, |n| n.parse().expect("a number")),
            }),
            "fp8" => Box::new(Fp8 {
                enabled: true,
                history: self.get("history").map(|n| n.parse().expect("a number")),
                exceptions: vec![],
                world_size: self.get("ranks").map_or(1, |n| n.parse().expect("a number")),
            }),
            "chunk_loss" => Box::new(ChunkLoss {
                chunks: Chunks::Fixed(self.get("chunks").map_or(2, |n| n.parse().expect("n"))),
                device: Device::h100(),
            }),
            "adapter" => Box::new(Lora {
                rank: self.get("rank").map_or(8, |n| n.parse().expect("a number")),
                alpha: self.get("alpha").map_or(8.0, |n| n.parse().expect("a number")),
                dropout: self.get("dropout").map_or(0.0, |n| n.parse().expect("a number")),
                targets: self.get("targets").map_or(vec![], |t| vec![t.to_string()]),
                trainable: self.get("trainable").map_or(vec![], |t| vec![t.to_string()]),
                frozen: self.get("frozen").map_or(vec![], |t| vec![t.to_string()]),
            }),
            "documents" => Box::new(Documents {
                separator: self.get("separator").map(|n| n.parse().expect("a token")),
                labels: vec![("labels".into(), -100)],
            }),
            "strip_functions" => Box::new(StripFunctions::default()),
            "hold_frozen" => Box::new(HoldFrozen { enabled: true }),
            "shard" => Box::new(Shard {
                world_size: self.get("ranks").map_or(1, |n| n.parse().expect("a number")),
                strategy: self
                    .get("strategy")
                    .map_or(Strategy::FullShard, |word| Strategy::of(word).expect("a strategy")),
                group: self.get("group").map_or(0, |n| n.parse().expect("a number")),
                wrap: Wrap::Blocks,
                reshard_after_forward: vec![Reshard { units: "**".into(), ranks: None }],
                no_sync: self.get("no_sync").is_some() || self.get("reproducible").is_some(),
                reproducible: self.get("reproducible").is_some(),
                reduce_dtype: self.dtype("reduce_dtype").unwrap_or(DType::F32),
                small_parameters: Default::default(),
            }),
            other => panic!("no pass `{other}`"),
        }
    }
}

/// Pseudo-random feeds for every leaf that either graph has.
fn feeds(graphs: [&Graph; 2]) -> HashMap<String, Tensor> {
    let mut generator = fastrand::Rng::with_seed(7);
    let mut random = move || generator.f64();
    let mut feeds = HashMap::new();
    for graph in graphs {
        for (_, node) in graph.nodes().filter(|(_, n)| !matches!(n.op, Op::Constant(_))) {
            let Some(key) = leaf_key(&node.op) else { continue };
            let ty = graph.ty(node.outputs[0]).clone();
            let n = ty.shape.numel();
            let init = match &node.op {
                Op::Param(param) => &param.init,
                _ => &Init::Weights,
            };
            feeds.entry(key).or_insert_with(|| {
                if let Init::Constant(value) = init {
                    return Tensor::splat(ty, *value);
                }
                if ty.dtype.is_float() {
                    let values = (0..n).map(|_| 2.0 * random() - 1.0).collect();
                    Tensor::floats(ty.dtype, ty.shape, values)
                } else {
                    let values = (0..n).map(|_| (random() * 3.0) as i64).collect();
                    Tensor::ints(ty.dtype, ty.shape, values)
                }
            });
        }
    }
    feeds
}

fn same_values(name: &str, numerics: Numerics, before: &Graph, after: &Graph) {
    let feeds = feeds([before, after]);
    let evaluate = |graph: &Graph| -> HashMap<String, Tensor> {
        run(graph, &feeds, Options::default()).expect("evaluates").into_iter().collect()
    };
    let (before, after) = (evaluate(before), evaluate(after));
    for (key, expected) in &before {
        let found = &after[key];
        assert_eq!(found.ty, expected.ty, "{name}: output {key}");
        let (found, expected) = (found.to_f64s(), expected.to_f64s());
        let largest =
            expected.iter().filter(|x| x.is_finite()).fold(1e-3, |m: f64, x| m.max(x.abs()));
        let tolerance = largest
            * match numerics {
                Numerics::Bitwise => 0.0,
                Numerics::Reassociates => 2e-6,
                // A product of numbers with 4 significant bits.
                Numerics::LowersPrecision if name.starts_with("fp8") => 0.2,
                Numerics::LowersPrecision => 4e-2,
            };
        for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
            let same = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
            let close = numerics != Numerics::Bitwise && (x - y).abs() <= tolerance;
            assert!(same || close, "{name}: output {key}[{i}] is {x}, was {y}");
        }
    }
}

fn check(path: &Path) {
    let name = path.strip_prefix(folder()).unwrap_or(path).display().to_string();
    let content = std::fs::read_to_string(path).expect("readable");
    assert!(content.lines().count() <= 40, "{name}: one idea, at most 40 lines");
    let header = Header::parse(&content);
    let (input, _) = content.split_once(SEPARATOR).unwrap_or((&content, ""));
    let before = text::parse(input).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut graph = before.clone();
    let pass = header.build();
    assert_eq!(pass.info().name, header.pass);
    let result = pass.run(&mut graph, &mut PassContext::default());
    let actual = match &result {
        Ok(_) => graph.to_string(),
        Err(error) => format!("; error {}: {error}\n", error.code),
    };
    expect_file![path].assert_eq(&format!("{}\n{SEPARATOR}{actual}", input.trim_end()));
    if result.is_ok() {
        let again = text::parse(&actual).unwrap_or_else(|e| panic!("{name}: result: {e}"));
        assert_eq!(again.to_string(), actual, "{name}: the text form is stable");
        // An evaluation computes something else: `tests/suite/eval.rs` compares it with onnxruntime's.
        if header.pass != "evaluate" {
            same_values(&name, pass.info().numerics, &before, &graph);
        }
        if matches!(header.pass.as_str(), "canonicalize" | "raise") {
            let again = pass.run(&mut graph, &mut PassContext::default());
            assert_eq!(again, Ok(Changed::No), "{name}: a second run finds nothing");
        }
    }
}

fn check_folder(pass: &str) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder().join(pass))
        .expect("the folder of the pass")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "frit"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty());
    paths.iter().for_each(|path| check(path));
}

#[test]
fn loss() {
    check_folder("loss");
}

#[test]
fn canonicalize() {
    check_folder("canonicalize");
}

#[test]
fn raise() {
    check_folder("raise");
}

#[test]
fn autocast() {
    check_folder("autocast");
}

#[test]
fn channels_last() {
    check_folder("channels_last");
}

#[test]
fn pad_tensor_cores() {
    check_folder("pad_tensor_cores");
}

#[test]
fn fp8() {
    check_folder("fp8");
}

#[test]
fn chunk_loss() {
    check_folder("chunk_loss");
}

#[test]
fn documents() {
    check_folder("documents");
}

#[test]
fn adapter() {
    check_folder("adapter");
}

/// `x·W + s·(x·Aᵀ)·Bᵀ` is `x·(W + s·(B·A)ᵀ)`, and only the adapter trains.
#[test]
fn an_adapter_is_a_change_of_its_weight() {
    for (dims, trans_b) in [([4, 6], false), ([6, 4], true)] {
        let before = text::parse(&format!(
            r#"graph @g world=1 {{
  %x: f64[2, 3, 4] = input {{name = "x", ty = {{"dtype": "f64", "shape": [2, 3, 4]}}}}
  %w: f64{dims:?} = param {{init = "weights", kind = "trainable", name = "h.q.weight", reason = "", ty = {{"dtype": "f64", "shape": {dims:?}}}}}
  %y: f64[2, 3, 6] = matmul %x, %w {{trans_a = false, trans_b = {trans_b}}}
  return %y as "y"
}}"#
        ))
        .expect("parses");
        let mut after = before.clone();
        let lora = Lora { rank: 2, alpha: 3.0, targets: vec!["**".into()], ..Lora::default() };
        let mut context = PassContext::default();
        assert_eq!(lora.run(&mut after, &mut context), Ok(Changed::Yes));
        let trains = after.params().filter(|(_, p)| p.kind == ParamKind::Trainable);
        let trains: Vec<String> = trains.map(|(_, p)| p.name.clone()).collect();
        assert_eq!(trains, adapter::names("h.q.weight"));
        assert_eq!(context.adapters["h.q.weight"].out_first, trans_b);

        let mut random = fastrand::Rng::with_seed(3);
        let mut feeds = HashMap::new();
        let mut feed = |key: &str, shape: &[usize]| {
            let n = shape.iter().product();
            let values: Vec<f64> = (0..n).map(|_| random.f64() - 0.5).collect();
            feeds.insert(key.to_string(), Tensor::floats(DType::F64, shape, values.clone()));
            values
        };
        let keys: HashMap<String, String> = after
            .params()
            .map(|(v, p)| (p.name.clone(), leaf_key(&after.def(v).op).expect("a leaf")))
            .collect();
        let [a, b] = adapter::names("h.q.weight");
        let (a, b) = (feed(&keys[&a], &[2, 4]), feed(&keys[&b], &[6, 2]));
        feed("x", &[2, 3, 4]);
        let mut w = feed(&keys["h.q.weight"], &dims);
        let adapted = run(&after, &feeds, Options::default()).expect("evaluates");
        for (out, width) in (0..6).flat_map(|out| (0..4).map(move |width| (out, width))) {
            let delta: f64 = (0..2).map(|k| b[out * 2 + k] * a[k * 4 + width]).sum();
            w[if trans_b { out * 4 + width } else { width * 6 + out }] += 1.5 * delta;
        }
        feeds.insert(keys["h.q.weight"].clone(), Tensor::floats(DType::F64, dims, w));
        let merged = run(&before, &feeds, Options::default()).expect("evaluates");
        for (x, y) in adapted[0].1.to_f64s().iter().zip(merged[0].1.to_f64s()) {
            assert!((x - y).abs() < 1e-12, "{x} is not {y}");
        }
    }
}

#[test]
fn strip_functions() {
    check_folder("strip_functions");
}

#[test]
fn hold_frozen() {
    check_folder("hold_frozen");
}

#[test]
fn shard() {
    check_folder("shard");
}

#[test]
fn evaluate() {
    check_folder("evaluate");
}

#[test]
fn sync_batch_norm() {
    check_folder("sync_batch_norm");
}
