//! Archives as PyTorch writes them (`tests/models/pt2`), damaged ones, and what is refused.

use super::is_archive;
use crate::diagnostics::Report;
use crate::import::onnx::messages::ModelProto;
use crate::import::{ImportOptions, Imported, load};
use frit_ir::interpret::{self, Options};
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Op, Tensor, TensorType};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};
use zip::write::FileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/pt2").join(path)
}

fn options(batch: usize) -> ImportOptions {
    ImportOptions { binds: [("batch".to_string(), batch)].into(), ..ImportOptions::default() }
}

fn imported(path: &str) -> Imported {
    load(&fixture(path), &options(4)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn tensor(view: &TensorView<'_>) -> Tensor {
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::BOOL => DType::Bool,
        other => panic!("{other:?}"),
    };
    Tensor::from_bytes(TensorType::new(dtype, view.shape()), view.data()).expect("its bytes")
}

/// Results of operators that are not PyTorch's.
fn differing(family: &str, file: &str) -> Vec<String> {
    let bytes =
        std::fs::read(fixture(&format!("operators/{family}.safetensors"))).expect("the cases");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let imported = match load(&fixture(&format!("operators/{file}.pt2")), &options(2)) {
        Ok(imported) => imported,
        Err(report) => return vec![report.to_string()],
    };
    let feeds: HashMap<String, Tensor> = all
        .iter()
        .filter_map(|(name, view)| Some((name.strip_prefix("in.")?.to_string(), tensor(&view))))
        .collect();
    let results = interpret::run(&imported.graph, &feeds, Options::default()).expect("values");
    let found: HashMap<&str, Tensor> = imported
        .graph
        .outputs
        .iter()
        .map(|o| o.name.as_str())
        .zip(results.into_iter().map(|(_, t)| t))
        .collect();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (name, view) in all.iter() {
        let Some(name) = name.strip_prefix("out.") else { continue };
        let (expected, Some(found)) = (tensor(&view), found.get(name)) else {
            wrong.push(format!("{name} is missing"));
            continue;
        };
        compared += 1;
        let close = |(a, b): (&f64, &f64)| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-5 + 1e-4 * b.abs()
        };
        let (a, b) = (found.to_f64s(), expected.to_f64s());
        if found.ty != expected.ty {
            wrong.push(format!("{name} is {}, not {}", found.ty, expected.ty));
        } else if !a.iter().zip(&b).all(close) {
            wrong.push(format!("{name} differs: {a:?} and {b:?}"));
        }
    }
    assert!(compared > 12, "only {compared} cases");
    wrong
}

#[test]
fn operators_give_what_pytorch_gives() {
    let files = std::fs::read_dir(fixture("operators")).expect("a folder");
    let names = files.map(|f| f.expect("a file").file_name().to_string_lossy().into_owned());
    let mut archives: Vec<String> =
        names.filter_map(|n| n.strip_suffix(".pt2").map(str::to_string)).collect();
    archives.sort_unstable();
    assert!(archives.len() >= 7, "{archives:?}");
    let mut wrong = Vec::new();
    for file in &archives {
        let family = file.strip_suffix("_decomposed").unwrap_or(file);
        wrong.extend(differing(family, file).into_iter().map(|w| format!("{file}: {w}")));
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn kinds(imported: &Imported) -> HashMap<String, ParamKind> {
    imported.graph.params().map(|(_, p)| (p.name.clone(), p.kind)).collect()
}

#[test]
fn tensors_are_what_the_module_says() {
    for file in ["mlp/model.pt2", "mlp/model_decomposed.pt2"] {
        let mlp = imported(file);
        let kinds = kinds(&mlp);
        assert_eq!(kinds["fc1.weight"], ParamKind::Trainable);
        assert_eq!(kinds["gate"], ParamKind::Frozen);
        assert_eq!(kinds["bn1.running_mean"], ParamKind::Buffer);
        assert_eq!(kinds["bn2.running_var"], ParamKind::Buffer);
        assert!(!kinds.contains_key("bn1.num_batches_tracked"));
        let inlined: Vec<&str> = mlp.inlined.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(inlined, ["offset", "scale"]);
        let detached = mlp.graph.nodes().filter(|(_, n)| format!("{:?}", n.op).contains("Detach"));
        assert_eq!(detached.count(), 1);
    }
    let gpt = imported("gpt/model.pt2");
    assert!(kinds(&gpt).contains_key("wte.weight") && !kinds(&gpt).contains_key("lm_head.weight"));
    assert_eq!(gpt.ties["lm_head.weight"].parameter, "wte.weight");
    let attends = gpt.graph.nodes().filter(|(_, n)| matches!(n.op, Op::Attention(_)));
    assert_eq!(attends.count(), 1);
    let scopes: Vec<&str> = gpt.graph.nodes().map(|(_, n)| &*n.origin.scope).collect();
    assert!(scopes.contains(&"h.0.qkv") && scopes.contains(&"lm_head"), "{scopes:?}");
    let encoder = imported("encoder/model.pt2");
    let outputs: Vec<&str> = encoder.graph.outputs.iter().map(|o| o.name.as_str()).collect();
    assert_eq!(outputs, ["logits", "pooled"]);
}

#[test]
fn an_alias_that_may_be_a_detach_is_warned_of() {
    let mut all = records(&fixture("mlp/model_decomposed.pt2"));
    let (_, content) = all.iter_mut().find(|(n, _)| n.ends_with("model.json")).expect("a graph");
    let text = String::from_utf8(content.clone()).expect("text");
    assert!(imported("mlp/model_decomposed.pt2").warnings.iter().all(|w| w.code != "W038"));
    assert!(text.contains(".detach\""), "{text}");
    *content = text.replace(".detach\"", ".mul\"").into_bytes();
    let lost = import(&written(&all, CompressionMethod::Stored)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(lost.warnings.iter().filter(|w| w.code == "W038").count(), 1);
}

/// The records of an archive.
fn records(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).expect("the archive");
    let mut zip = ZipArchive::new(Cursor::new(bytes)).expect("a zip");
    (0..zip.len())
        .map(|i| {
            let mut entry = zip.by_index(i).expect("a record");
            let mut content = Vec::new();
            entry.read_to_end(&mut content).expect("its bytes");
            (entry.name().to_string(), content)
        })
        .collect()
}

/// An archive of these records.
fn written(records: &[(String, Vec<u8>)], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in records {
        zip.start_file(name, FileOptions::default().compression_method(method)).expect("a record");
        zip.write_all(content).expect("its bytes");
    }
    zip.finish().expect("the end").into_inner()
}

fn import(bytes: &[u8]) -> Result<Imported, Report> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.pt2");
    std::fs::write(&path, bytes).expect("written");
    load(&path, &options(4))
}

/// The archive with a record edited as text.
fn edited(record: &str, from: &str, to: &str) -> Vec<u8> {
    let mut all = records(&fixture("mlp/model.pt2"));
    let (_, content) = all.iter_mut().find(|(n, _)| n.ends_with(record)).expect(record);
    let text = String::from_utf8(content.clone()).expect("text");
    assert!(text.contains(from), "{from} is not in {record}");
    *content = text.replacen(from, to, 1).into_bytes();
    written(&all, CompressionMethod::Stored)
}

fn refusal(bytes: &[u8]) -> String {
    let report = import(bytes).expect_err("must be refused");
    assert_eq!(report.exit_code(), 2);
    assert!(!report.is_internal(), "{report}");
    report.diagnostics.iter().map(|d| format!("{} ", d.code)).collect::<String>()
        + &report.to_string()
}

#[test]
fn damaged_archives_are_refused() {
    let all = records(&fixture("mlp/model.pt2"));
    assert!(import(&written(&all, CompressionMethod::Stored)).is_ok());
    let without = |name: &str| {
        let kept: Vec<_> = all.iter().filter(|(n, _)| !n.ends_with(name)).cloned().collect();
        written(&kept, CompressionMethod::Stored)
    };
    let mut cut = all.clone();
    cut.iter_mut().find(|(n, _)| n.ends_with("/weight_0")).expect("a weight").1.truncate(5);
    let mut big = all.clone();
    big.iter_mut().find(|(n, _)| n.ends_with("byteorder")).expect("an order").1 = b"big".to_vec();
    let model = "models/model.json";
    let config = "model_weights_config.json";
    let expr = "\"expr_str\": \"Symbol('";
    for (bytes, parts) in [
        (b"PK\x03\x04 and no more".to_vec(), &["E035", "no complete zip file"][..]),
        (without(model), &["E035", "models/*.json"]),
        (without("/weight_0"), &["E035", "weight_0` is missing"]),
        (without(config), &["E035", "has no data"]),
        (written(&cut, CompressionMethod::Stored), &["E035", "needs more bytes than the 5"]),
        (written(&big, CompressionMethod::Stored), &["E035", "little-endian"]),
        (edited(model, "{\"graph_module\"", "{\"graph_modules\""), &["E035", "graph_module"]),
        (edited(model, "\"major\": 8", "\"major\": 9"), &["E035", "version 9.", "reads 8"]),
        (edited(model, "\"as_tensor\"", "\"as_tensr\""), &["E035", "as_tensr"]),
        (edited(config, "\"as_int\": 16", "\"as_int\": -16"), &["E035", "no valid shape"]),
        (edited(config, "\"as_int\": 16", "\"as_int\": 1600000"), &["E035", "needs more bytes"]),
        (
            edited(config, "\"as_int\": 12", "\"as_int\": 4611686018427387904"),
            &["E035", "no valid shape"],
        ),
        (
            edited(
                config,
                "\"storage_offset\": {\"as_int\": 0}",
                "\"storage_offset\": {\"as_int\": 99}",
            ),
            &["E035", "needs more bytes"],
        ),
        (
            edited(config, "\"use_pickle\": false", "\"use_pickle\": true"),
            &["E035", "Python object"],
        ),
        (edited(config, "\"dtype\": 7", "\"dtype\": 10"), &["E035", "no valid shape"]),
        (
            edited(
                model,
                "\"target\": \"torch.ops.aten.linear.default\", \"inputs\": [{\"name\": \"input\", \"arg\": {\"as_tensor\": {\"name\": \"",
                "\"target\": \"torch.ops.aten.linear.default\", \"inputs\": [{\"name\": \"input\", \"arg\": {\"as_tensor\": {\"name\": \"no_",
            ),
            &["E015", "never defined"],
        ),
        (
            edited(
                model,
                "{\"name\": \"momentum\", \"arg\": {\"as_float\": 0.1}",
                "{\"name\": \"momentum\", \"arg\": {\"as_string\": \"x\"}",
            ),
            &["E035", "momentum"],
        ),
        (edited(model, expr, "\"expr_str\": \"Log('"), &["E020"]),
    ] {
        let text = refusal(&bytes);
        for part in parts {
            assert!(text.contains(part), "`{part}` is not in {text}");
        }
    }
    let compressed = written(&all, CompressionMethod::Deflated);
    assert!(is_archive(&compressed) && refusal(&compressed).contains("is compressed"));
}

#[test]
fn any_byte_may_be_wrong() {
    // Neither a panic nor a large allocation: lengths are those of the file.
    let bytes = std::fs::read(fixture("mlp/model.pt2")).expect("the archive");
    for end in (4..bytes.len()).step_by(bytes.len() / 60) {
        assert!(import(&bytes[..end]).is_err(), "{end} bytes");
    }
    let mut random = 7u64;
    let mut next = |n: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % n
    };
    let all = records(&fixture("mlp/model.pt2"));
    let texts: Vec<usize> = (0..all.len()).filter(|i| all[*i].0.ends_with(".json")).collect();
    for _ in 0..150 {
        let mut all = all.clone();
        let content = &mut all[texts[next(texts.len())]].1;
        let place = next(content.len());
        content[place] = b"0123456789-\"{}[],:abz"[next(21)];
        if let Err(report) = import(&written(&all, CompressionMethod::Stored)) {
            assert!(!report.is_internal(), "{report}");
        }
        let mut bytes = bytes.clone();
        let directory = bytes.len() - 1 - next(6000);
        bytes[directory] = next(256) as u8;
        if let Err(report) = import(&bytes) {
            assert!(!report.is_internal(), "{report}");
        }
    }
}

#[test]
fn any_number_may_be_wrong() {
    // Sizes, axes and options of all operators: neither a panic nor an allocation of their size.
    let wrong =
        ["-9223372036854775808", "-7", "-1", "0", "1", "5", "1099511627776", "9223372036854775807"];
    let mut random = 11u64;
    let mut next = |n: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % n
    };
    for family in ["image", "layout", "parts", "pictures", "pointwise", "reduction", "special"] {
        let all = records(&fixture(&format!("operators/{family}.pt2")));
        let graph = all.iter().position(|(n, _)| n.ends_with("model.json")).expect("a graph");
        let text = String::from_utf8(all[graph].1.clone()).expect("text");
        // Integers that are arguments or sizes.
        let places: Vec<usize> =
            text.match_indices("as_int\":").map(|(i, m)| i + m.len()).collect();
        let lists: Vec<usize> =
            text.match_indices("as_ints\": [").map(|(i, m)| i + m.len()).collect();
        let places = [places, lists].concat();
        assert!(places.len() > 20, "{family}: {}", places.len());
        for _ in 0..60 {
            let begin = places[next(places.len())];
            let begin = begin + text[begin..].find(|c: char| c != ' ').unwrap_or(0);
            let end = text[begin..].find(|c: char| c != '-' && !c.is_ascii_digit()).unwrap_or(0);
            let number = wrong[next(wrong.len())];
            let mut all = all.clone();
            all[graph].1 = [&text[..begin], number, &text[begin + end..]].concat().into_bytes();
            if let Err(report) = import(&written(&all, CompressionMethod::Stored)) {
                assert!(!report.is_internal(), "{family}, {number} at {begin}: {report}");
            }
        }
    }
}

#[test]
fn everything_that_is_not_supported_is_named_at_once() {
    let mut all = records(&fixture("mlp/model.pt2"));
    let (_, content) = all.iter_mut().find(|(n, _)| n.ends_with("model.json")).expect("a graph");
    let text = String::from_utf8(content.clone()).expect("text");
    let text = text.replace("aten.linear.default", "aten.frobnicate.default");
    *content = text.replace("aten.detach.default", "mylib.halve.default").into_bytes();
    let text = refusal(&written(&all, CompressionMethod::Stored));
    for part in [
        "E031",
        "2 operators are not supported (4 calls)",
        "aten.frobnicate.default  3",
        "`fc1`",
        "mylib.halve.default  1",
        "run_decompositions",
    ] {
        assert!(
            text.contains(part) || text.contains(&part.replace("aten.", "")),
            "`{part}` is not in {text}"
        );
    }
}

#[test]
fn state_that_outputs_depend_on_is_refused() {
    // The counter of a normalization becomes a factor.
    let model = "models/model.json";
    let from = "{\"name\": \"other\", \"arg\": {\"as_tensor\": {\"name\": \"p_gate\"}}";
    let to =
        "{\"name\": \"other\", \"arg\": {\"as_tensor\": {\"name\": \"b_bn1_num_batches_tracked\"}}";
    let text = refusal(&edited(model, from, to));
    assert!(text.contains("E032") && text.contains("`bn1.num_batches_tracked`"), "{text}");
}

#[test]
fn what_is_written_in_place_must_have_no_other_reader() {
    // The operand of `relu_` is read again later.
    let model = "models/model.json";
    let text = String::from_utf8(
        records(&fixture("mlp/model.pt2"))
            .into_iter()
            .find(|(n, _)| n.ends_with(model))
            .expect("a graph")
            .1,
    )
    .expect("text");
    assert!(text.contains("aten.relu_.default"));
    let from = "{\"target\": \"torch.ops.aten.relu_.default\", \"inputs\": [{\"name\": \"self\", \"arg\": {\"as_tensor\": {\"name\": \"batch_norm\"}}";
    assert!(text.contains(from), "{text}");
    // A view of it that is read later, in place of the second layer's operand.
    let view = "{\"target\": \"torch.ops.aten.alias.default\", \"inputs\": [{\"name\": \"self\", \"arg\": {\"as_tensor\": {\"name\": \"batch_norm\"}}, \"kind\": 1}], \"outputs\": [{\"as_tensor\": {\"name\": \"linear\"}}], \"metadata\": {}}, ";
    let edited = text
        .replace("\"as_tensor\": {\"name\": \"linear\"}", "\"as_tensor\": {\"name\": \"first\"}");
    let edited = edited.replace("\"linear\": {\"dtype\"", "\"first\": {\"dtype\"");
    let edited = edited.replacen(from, &format!("{view}{from}"), 1);
    let edited = edited.replace("\"tensor_values\": {", "\"tensor_values\": {\"linear\": {\"dtype\": 7, \"sizes\": [{\"as_int\": 4}, {\"as_int\": 16}]}, ");
    let second = "{\"name\": \"input\", \"arg\": {\"as_tensor\": {\"name\": \"relu_\"}}";
    let edited = edited.replacen(second, &second.replace("relu_", "linear"), 1);
    let mut all = records(&fixture("mlp/model.pt2"));
    all.iter_mut().find(|(n, _)| n.ends_with(model)).expect("a graph").1 = edited.into_bytes();
    let text = refusal(&written(&all, CompressionMethod::Stored));
    assert!(text.contains("E032") && text.contains("a view that is read later"), "{text}");
}

#[test]
fn an_archive_is_known_by_its_first_bytes() {
    let bytes = std::fs::read(fixture("mlp/model.pt2")).expect("the archive");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.zip");
    std::fs::write(&path, &bytes).expect("written");
    assert!(load(&path, &options(4)).is_ok());
    assert_eq!(crate::import::symbols::symbols(&path), ["batch"]);
    let onnx = crate::import::as_onnx(bytes.into(), &path).expect("a model");
    let model = <ModelProto as prost::Message>::decode(onnx).expect("ONNX");
    assert_eq!(model.opset_import[0].version, super::OPSET);
}
