//! Models that must be refused, with messages that help; damaged files, which must not crash.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::ops::ParamKind;
use prost::Message;
use prost::bytes::Bytes;
use std::path::Path;

fn free() -> ImportOptions {
    ImportOptions::default()
}

fn x() -> Vec<ValueInfoProto> {
    vec![input("x", 1, &[Dim::S("batch"), Dim::N(4)])]
}

fn batch() -> ImportOptions {
    bind(&[("batch", 2)])
}

#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn dimensions_must_be_bound_and_known() {
    let relu = model(x(), vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    says(&refused(&relu, &free()), &["E020", "`batch`", "input \"x\"", "--bind batch=N"]);
    let both = bind(&[("batch", 2), ("seq", 3)]);
    says(&refused(&relu, &both), &["E021", "`seq`", "dimensions are `batch`"]);
    let inputs = vec![input("x", 1, &[Dim::S("batch*seq"), Dim::S("batch + 1")])];
    let relu = model(inputs, vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    let graph = import(&relu, &both).unwrap().graph;
    assert_eq!(graph.ty(graph.outputs[0].value).to_string(), "f32[6, 3]");
    says(&refused(&relu, &batch()), &["`seq`", "--bind seq=N"]);
}

#[test]
fn the_first_axis_is_the_batch_if_it_has_no_name() {
    let inputs =
        |axis: fn() -> Dim| vec![input("x", 1, &[axis(), Dim::N(4)]), input("z", 1, &[axis()])];
    for inputs in [inputs(|| Dim::S("")), inputs(|| Dim::N(-1))] {
        let relu = model(inputs, vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
        let graph = import(&relu, &batch()).unwrap_or_else(|e| panic!("{e}")).graph;
        assert_eq!(graph.ty(graph.outputs[0].value).to_string(), "f32[2, 4]");
        says(&refused(&relu, &free()), &["E020", "`batch`", "--bind batch=N"]);
    }
    let time_first = vec![input("x", 1, &[Dim::S(""), Dim::S("batch")])];
    let other = model(time_first, vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    says(&refused(&other, &batch()), &["E020", "axis 0 of input \"x\" has neither"]);
    let second = vec![input("x", 1, &[Dim::N(4), Dim::S("")])];
    let relu = model(second, vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    says(
        &refused(&relu, &free()),
        &["E020", "axis 1 of input \"x\" has neither a size nor a name"],
    );
}

#[test]
fn of_several_versions_of_an_operator_set_the_last_one_counts() {
    let mut relu = model(x(), vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    let other = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
    relu.opset_import = vec![other("", 13), other("ai.onnx.ml", 1), other("ai.onnx", 17)];
    assert!(import(&relu, &batch()).is_ok());
    relu.opset_import.push(other("", 99));
    says(&refused(&relu, &batch()), &["E033", "opset 99"]);
}

#[test]
fn weights_of_classes_do_not_train() {
    for (op, scores) in [("SoftmaxCrossEntropyLoss", "h"), ("NegativeLogLikelihoodLoss", "h")] {
        let nodes = vec![
            node("MatMul", &["x", "w"], &["h"]),
            node("Identity", &["classes"], &["copy"]),
            node(op, &[scores, "labels", "copy"], &["loss"]),
        ];
        let inputs = vec![
            input("x", 1, &[Dim::S("batch"), Dim::N(2)]),
            input("labels", 7, &[Dim::S("batch")]),
        ];
        let stored =
            vec![floats("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), floats("classes", &[2], &[0.5, 2.0])];
        let imported = import(&model(inputs, stored, nodes, &["loss"]), &batch());
        let graph = imported.unwrap_or_else(|e| panic!("{e}")).graph;
        let kinds: Vec<_> = graph.params().map(|(_, p)| (p.name.as_str(), p.kind)).collect();
        let trained = |name: &str| kinds.contains(&(name, ParamKind::Trainable));
        assert!(trained("w") && !trained("classes"), "{kinds:?}");
    }
}

#[test]
fn a_batch_that_the_shapes_hold_may_be_bound_to_the_same_size() {
    let inputs = vec![input("x", 1, &[Dim::N(2), Dim::N(4)]), input("z", 1, &[Dim::N(2)])];
    let relu = model(inputs, vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    let graph = import(&relu, &batch()).unwrap_or_else(|e| panic!("{e}")).graph;
    assert_eq!(graph.ty(graph.outputs[0].value).to_string(), "f32[2, 4]");
    let other = bind(&[("batch", 4)]);
    says(&refused(&relu, &other), &["E021", "`batch`", "no symbolic dimension"]);
}

#[test]
fn weights_in_constants_are_warned_of() {
    let constant = |name: &str, dims: &[i64]| {
        let elements = dims.iter().product::<i64>() as usize;
        let t = Some(Box::new(floats("", dims, &vec![0.5; elements])));
        node("Constant", &[], &[name]).with(&[AttributeProto {
            name: "value".into(),
            t,
            r#type: 4,
            ..Default::default()
        }])
    };
    let nodes = vec![
        constant("table", &[4, 3]),
        constant("row", &[1, 3]),
        constant("half", &[]),
        node("Identity", &["table"], &["view"]),
        node("MatMul", &["x", "view"], &["a"]),
        node("Add", &["a", "row"], &["b"]),
        node("Mul", &["b", "half"], &["c"]),
        node("MatMul", &["c", "w"], &["y"]),
    ];
    let stored = vec![floats("w", &[3, 2], &[0.5; 6])];
    let mut network = model(x(), stored, nodes, &["y"]);
    let warnings = |network: &ModelProto| {
        let imported = import(network, &batch()).unwrap_or_else(|e| panic!("{e}"));
        imported.warnings
    };
    let said = warnings(&network);
    assert_eq!((said.len(), said[0].code.as_str()), (1, "W041"));
    assert_eq!(said[0].message, "the weight `table` is a constant and does not train");
    assert_eq!(said[0].notes, ["table [4, 3], of MatMul `n_a`"]);
    // PyTorch's exporters store every parameter as an initializer: a constant is one in the module.
    network.producer_name = "pytorch".into();
    assert!(warnings(&network).is_empty());
}

#[test]
fn outputs_that_no_loss_can_read_need_no_operators() {
    let nodes = || {
        vec![
            node("Relu", &["x"], &["scores"]),
            node("ArgMax", &["x"], &["best"]),
            NodeProto {
                domain: "ai.onnx.ml".into(),
                ..node("ArrayFeatureExtractor", &["k", "best"], &["label"])
            },
        ]
    };
    let stored = vec![ints("k", &[1, 2, 3, 4])];
    let mut classifier = model(x(), stored, nodes(), &["label", "scores"]);
    let outputs = &mut classifier.graph.as_mut().unwrap().output;
    outputs[0] = input("label", 7, &[Dim::S("batch")]);
    outputs[1] = input("scores", 1, &[Dim::S("batch"), Dim::N(4)]);
    let imported = import(&classifier, &batch()).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<&str> = imported.graph.outputs.iter().map(|o| o.name.as_str()).collect();
    assert_eq!((&names[..], imported.warnings[0].code.as_str()), (&["scores"][..], "W040"));
    // A float may be read, and a model has an output.
    let outputs = &mut classifier.graph.as_mut().unwrap().output;
    outputs[0] = input("label", 1, &[Dim::S("batch")]);
    says(&refused(&classifier, &batch()), &["E031", "ArrayFeatureExtractor"]);
    let outputs = &mut classifier.graph.as_mut().unwrap().output;
    outputs[0] = input("label", 7, &[Dim::S("batch")]);
    outputs.pop();
    says(&refused(&classifier, &batch()), &["E031", "ArrayFeatureExtractor"]);
}

#[test]
fn everything_unsupported_is_reported_at_once() {
    let nodes = vec![
        node("NonMaxSuppression", &["x"], &["a"]),
        node("Unique", &["x", "k"], &["b", "c"]),
        node("Unique", &["x", "k"], &["d", "e"]),
        node("Relu", &["x"], &["f"]).with(&[int("consumed_inputs", 1)]),
        NodeProto { domain: "com.microsoft".into(), ..node("Gelu", &["x"], &["g"]) },
        node("Hardmax", &["x"], &["unused"]),
    ];
    let m = model(x(), vec![ints("k", &[1])], nodes, &["a", "b", "d", "f", "g"]);
    let text = refused(&m, &batch());
    says(&text, &["E031", "3 operators are not supported (4 nodes, opset 18)"]);
    says(
        &text,
        &[
            "NonMaxSuppression  1   first: node #0 \"n_a\"",
            "Unique  2   first: node #1",
            "com.microsoft::Gelu",
            "onnxruntime's optimizer",
        ],
    );
    says(&text, &["E032", "Relu.consumed_inputs  1", "node #3 \"n_f\""]);
    assert!(!text.contains("Hardmax"), "a node that no output needs was reported: {text}");
}

#[test]
fn values_of_attributes_are_refused_with_their_node() {
    let pad = node("Pad", &["x", "p"], &["y"]).with(&[text("mode", "mirror")]);
    let m = model(x(), vec![ints("p", &[0, 0, 0, 0])], vec![pad], &["y"]);
    says(&refused(&m, &batch()), &["E032", "Pad: mode = \"mirror\"", "node \"n_y\""]);
    let dropout = node("Dropout", &["x", "r", "t"], &["y"]);
    let t =
        TensorProto { name: "t".into(), data_type: 9, int32_data: vec![1], ..Default::default() };
    let on = model(x(), vec![floats("r", &[], &[1.5]), t.clone()], vec![dropout.clone()], &["y"]);
    says(&refused(&on, &batch()), &["ratio 1.5 is not a probability"]);
    let off = model(x(), vec![floats("r", &[], &[0.0]), t], vec![dropout], &["y"]);
    assert!(import(&off, &batch()).is_ok());
}

/// As PyTorch's exporters write the dropout of attention weights, and only where the module drops.
#[test]
fn a_dropout_without_a_mode_drops_if_pytorch_wrote_it() {
    let drops = |producer: &str, ratio: f32| {
        let dropout = node("Dropout", &["x", "r"], &["y"]);
        let mut m = model(x(), vec![floats("r", &[], &[ratio])], vec![dropout], &["y"]);
        m.producer_name = producer.into();
        let imported = import(&m, &batch()).unwrap_or_else(|e| panic!("{e}"));
        imported.graph.nodes().any(|(_, n)| matches!(n.op, frit_ir::Op::RandomMask(_)))
    };
    assert!(drops("pytorch", 0.5));
    assert!(!drops("pytorch", 0.0));
    assert!(!drops("backend-test", 0.5));
}

#[test]
fn misfits_show_operands() {
    let matmul = node("MatMul", &["x", "w"], &["y"]);
    let later = node("Relu", &["y"], &["z"]);
    let m = model(x(), vec![floats("w", &[3, 2], &[0.0; 6])], vec![matmul, later], &["z"]);
    let text = refused(&m, &batch());
    says(&text, &["E014", "MatMul: contracted sizes are 4 and 3", "opset 18"]);
    says(&text, &["input 0  \"x\"  f32[2, 4]", "input 1  \"w\"  f32[3, 2]"]);
    assert!(!text.contains("Relu"), "the node after it was reported too: {text}");
    let dynamic = node("Reshape", &["x", "s"], &["y"]);
    let inputs = vec![x().remove(0), input("s", 7, &[Dim::N(1)])];
    says(
        &refused(&model(inputs, vec![], vec![dynamic], &["y"]), &batch()),
        &["E034", "the shape depends on data"],
    );
}

#[test]
fn broken_graphs_are_named() {
    let cycle = vec![node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"])];
    says(
        &refused(&model(x(), vec![], cycle, &["b"]), &batch()),
        &["E012", "cycle", "\"n_a\"", "\"n_b\""],
    );
    let undefined = vec![node("Relu", &["nowhere"], &["y"])];
    says(
        &refused(&model(x(), vec![], undefined, &["y"]), &batch()),
        &["E015", "\"nowhere\"", "\"n_y\""],
    );
    let twice = vec![node("Relu", &["x"], &["y"]), node("Abs", &["x"], &["y"])];
    says(&refused(&model(x(), vec![], twice, &["y"]), &batch()), &["E016", "defined twice"]);
    let back = vec![node("Relu", &["a"], &["y"]), node("Abs", &["x"], &["a"])];
    assert!(import(&model(x(), vec![], back, &["y"]), &batch()).is_ok(), "order of nodes is free");
}

#[test]
fn opsets_and_foreign_files_are_refused() {
    let mut old = model(x(), vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    old.opset_import[0].version = 99;
    says(&refused(&old, &batch()), &["E033", "opset 99", "opsets 1 to 27"]);
    old.opset_import.clear();
    says(&refused(&old, &batch()), &["E033"]);
    let garbage = Bytes::from_static(b"PK\x03\x04 not a model");
    let report = crate::import::onnx::import(garbage, "g", Path::new("."), &free()).unwrap_err();
    says(&report.to_string(), &["not a complete ONNX model"]);
    let missing = crate::import::load(Path::new("/nonexistent/m.onnx"), &free()).unwrap_err();
    says(&missing.to_string(), &["cannot read the model /nonexistent/m.onnx"]);
}

#[test]
fn external_data_is_read_in_place_or_missed_by_name() {
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    let external = |location: &str, offset: &str| TensorProto {
        name: "w".into(),
        dims: vec![4],
        data_type: 1,
        data_location: 1,
        external_data: vec![entry("location", location), entry("offset", offset)],
        ..Default::default()
    };
    let add = || vec![node("Add", &["x", "w"], &["y"])];
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = [9f32, 1.0, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    std::fs::write(folder.path().join("w.bin"), bytes).unwrap();
    let try_import = |location: &str, offset: &str| {
        let m = model(x(), vec![external(location, offset)], add(), &["y"]);
        crate::import::onnx::import(
            m.encode_to_vec().into(),
            "m",
            &folder.path().join("m.onnx"),
            &batch(),
        )
    };
    let imported = try_import("w.bin", "4").unwrap();
    assert_eq!(imported.weights.get("w").unwrap().floats(0..4), [1.0, 2.0, 3.0, 4.0]);
    for (location, offset, expected) in [
        ("gone.bin", "0", "gone.bin, which cannot be read"),
        ("../w.bin", "0", "`../w.bin` is not beside the model"),
        ("/etc/hostname", "0", "is not beside the model"),
        ("w.bin", "8", "has 20 bytes, and the tensor lies at 8 with 16 bytes"),
        ("w.bin", "-1", "`offset` is `-1`"),
    ] {
        let text = try_import(location, offset).unwrap_err().to_string();
        let code = try_import(location, offset).unwrap_err().diagnostics[0].code.clone();
        assert_eq!(code, "E013");
        says(&text, &["the initializer \"w\" cannot be read", expected]);
    }
}

#[test]
fn what_trains_is_decided_with_a_reason() {
    let nodes = vec![
        node("Mul", &["f", "p"], &["angle"]),
        node("Cos", &["angle"], &["table"]),
        node("Add", &["x", "table"], &["a"]),
        node("Mul", &["a", "w"], &["b"]),
        node("Mul", &["b", "scale"], &["c"]),
        node("Add", &["c", "head.bias"], &["d"]),
        node("Greater", &["d", "threshold"], &["over"]),
        node("Where", &["over", "d", "x"], &["y"]),
    ];
    let big = vec![0.5; 8192];
    let four = |name: &str| floats(name, &[4], &[1.0; 4]);
    let mut tensors = vec![four("f"), four("p"), four("w"), four("head.bias"), four("threshold")];
    tensors.push(floats("scale", &[], &[2.0]));
    let mut m = model(x(), tensors, nodes, &["y"]);
    let kinds = |m: &ModelProto, options: &ImportOptions| {
        let imported = import(m, options).unwrap();
        let mut all: Vec<String> = imported
            .graph
            .params()
            .map(|(_, p)| format!("{} {:?} {}", p.name, p.kind, p.reason))
            .collect();
        all.extend(imported.inlined.iter().map(|i| format!("{} inlined {}", i.name, i.reason)));
        all.sort();
        all
    };
    assert_eq!(
        kinds(&m, &batch()),
        [
            "f inlined it reaches the outputs only through sines and cosines of values that do not depend on data.",
            "head.bias Trainable it is a float that reaches the outputs.",
            "p inlined it reaches the outputs only through sines and cosines of values that do not depend on data.",
            "scale inlined it is a scalar constant.",
            "threshold inlined no gradient path leads from it to an output.",
            "w Trainable it is a float that reaches the outputs.",
        ]
    );
    let options = ImportOptions {
        frozen: vec!["*.bias".into(), "**.bias".into()],
        trainable: vec!["f".into()],
        ..batch()
    };
    let found = kinds(&m, &options);
    assert_eq!(found[1], "head.bias Frozen `params.frozen` matches its name.");
    assert_eq!(found[5], "w Frozen `params.trainable` does not match its name.");
    // The TorchScript exporter stores what the module holds, scalars too, under its own names.
    m.producer_name = "pytorch".into();
    let found = kinds(&m, &batch());
    assert!(found.contains(&"scale Trainable it is a float that reaches the outputs.".to_string()));
    let graph = m.graph.as_mut().unwrap();
    graph.metadata_props.push(StringStringEntryProto {
        key: "pkg.torch.export.ExportedProgram.graph_signature".into(),
        value: "p_s: PARAMETER target='scale'\nb_w: BUFFER target='w' persistent=True\n".into(),
    });
    graph.initializer[2] = floats("w", &[2048, 1, 4], &big);
    let imported = import(&m, &batch()).unwrap();
    let kind =
        |name: &str| imported.graph.params().find(|(_, p)| p.name == name).map(|(_, p)| p.kind);
    assert_eq!(kind("scale"), Some(ParamKind::Trainable), "the exporter says so");
    assert_eq!(kind("w"), Some(ParamKind::Buffer), "a large buffer stays a leaf");
    assert!(imported.weights.get("w").is_some());
}

#[test]
fn damaged_files_do_not_crash() {
    let matmul =
        node("Gemm", &["x", "w", "b"], &["h"]).with(&[int("transB", 1), float("alpha", 0.5)]);
    let nodes = vec![
        matmul,
        node("Slice", &["h", "s", "e", "a", "t"], &["i"]),
        node("Reshape", &["i", "to"], &["j"]),
        node("Pad", &["j", "p"], &["k"]),
        node("Tile", &["k", "r"], &["l"]),
        node("ReduceMean", &["l", "a"], &["m"]),
        node("Shape", &["m"], &["sh"]),
        node("ConstantOfShape", &["sh"], &["z"]),
        node("Add", &["m", "z"], &["y"]),
    ];
    let tensors = vec![
        floats("w", &[3, 4], &[0.5; 12]),
        floats("b", &[3], &[1.0; 3]),
        ints("s", &[0]),
        ints("e", &[2]),
        ints("a", &[1]),
        ints("t", &[1]),
        ints("to", &[0, -1]),
        ints("p", &[0, 1, 0, 1]),
        ints("r", &[1, 2]),
    ];
    let bytes = model(x(), tensors, nodes, &["y"]).encode_to_vec();
    let load = |bytes: Vec<u8>| {
        crate::import::onnx::import(bytes.into(), "f", Path::new("/nonexistent"), &batch())
    };
    load(bytes.clone()).unwrap_or_else(|e| panic!("{e}"));
    let mut refused = 0;
    for n in 0..bytes.len() {
        refused += usize::from(load(bytes[..n].to_vec()).is_err());
        for flip in [0x01, 0x10, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[n] ^= flip;
            refused += usize::from(load(damaged).is_err());
        }
    }
    assert!(refused > bytes.len(), "most damage must be noticed, not {refused}");
}
