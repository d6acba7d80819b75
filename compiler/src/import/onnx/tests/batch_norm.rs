//! Which statistics BatchNormalization uses, and what becomes of the running ones.

use super::build::*;
use crate::import::ImportOptions;
use crate::import::onnx::messages::*;
use frit_ir::ops::ParamKind;
use frit_ir::{DType, Op, OutputKind, Tensor};

const X: [Dim; 2] = [Dim::N(2), Dim::N(1)];

/// `x[2, 1]` normalized; the running mean is 1, the running variance 4, the scale 2.
fn normalized(attributes: &[AttributeProto]) -> ModelProto {
    let vector = |name: &str, value: f32| floats(name, &[1], &[value]);
    let weights = vec![vector("s", 2.0), vector("b", 0.5), vector("m", 1.0), vector("v", 4.0)];
    let node = node("BatchNormalization", &["x", "s", "b", "m", "v"], &["y"]);
    let eps = float("epsilon", 0.0);
    let attributes = [&[eps], attributes].concat();
    model(vec![input("x", 1, &X)], weights, vec![node.with(&attributes)], &["y"])
}

fn train() -> ImportOptions {
    ImportOptions { batch_norm_trains: true, ..ImportOptions::default() }
}

fn values(model: &ModelProto, options: &ImportOptions) -> (Vec<f64>, usize, usize) {
    let imported = import(model, options).unwrap_or_else(|e| panic!("{e}"));
    let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
    let found = run(&imported, &[("x", x)]);
    let outputs = &imported.graph.outputs;
    let y = outputs.iter().position(|o| o.kind == OutputKind::Result).expect("y");
    let carries = outputs.iter().filter(|o| matches!(o.kind, OutputKind::Carry(_))).count();
    (found[y].to_f64s(), carries, imported.warnings.len())
}

#[test]
fn as_exported_keeps_running_statistics_with_a_warning() {
    let (y, carries, warnings) = values(&normalized(&[]), &ImportOptions::default());
    assert_eq!(y, [2.5, 6.5]);
    assert_eq!((carries, warnings), (0, 1));
    let imported = import(&normalized(&[]), &ImportOptions::default());
    assert_eq!(imported.unwrap_or_else(|e| panic!("{e}")).warnings[0].code, "W036");
}

#[test]
fn training_uses_the_batch_and_renews_the_running_statistics() {
    for (model, options) in [
        (normalized(&[int("training_mode", 1)]), ImportOptions::default()),
        (normalized(&[]), train()),
    ] {
        let imported = import(&model, &options).unwrap_or_else(|e| panic!("{e}"));
        let trains = imported.graph.nodes().any(|(_, n)| matches!(n.op, Op::BatchNorm(_)));
        assert!(trains);
        let carried = imported.graph.outputs.iter().filter_map(|o| match o.kind {
            OutputKind::Carry(leaf) => Some((o.name.as_str(), leaf)),
            _ => None,
        });
        let names: Vec<&str> = carried.map(|(name, _)| name).collect();
        assert_eq!(names, ["m", "v"]);
        assert!(imported.warnings.is_empty());
    }
}

/// As of an auxiliary head whose result is not returned: the module renews them whenever it is called.
#[test]
fn statistics_of_values_that_nothing_reads_are_renewed() {
    for (attributes, options) in
        [(&[int("training_mode", 1)][..], ImportOptions::default()), (&[], train())]
    {
        let mut unread = normalized(attributes);
        let graph = unread.graph.as_mut().expect("a graph");
        let double = [node("Add", &["x", "x"], &["h"]), node("Mul", &["x", "s"], &["z"])];
        graph.node.splice(0..0, double.map(|n| n.with(&[])));
        graph.node[2].input[0] = "h".into();
        graph.output[0].name = "z".into();
        let imported = import(&unread, &options).unwrap_or_else(|e| panic!("{e}"));
        let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
        let found = run(&imported, &[("x", x)]);
        let carried = imported.graph.outputs.iter().zip(found);
        let carried: Vec<_> = carried
            .filter(|(o, _)| matches!(o.kind, OutputKind::Carry(_)))
            .map(|(o, x)| (o.name.as_str(), x.to_f64s()[0]))
            .collect();
        // Of 6 and 14: a mean of 10 and a variance of 16, of which a tenth is taken.
        let expected = [("m", 0.9 + 1.0), ("v", 3.6 + 1.6)];
        for ((name, value), (wanted, expected)) in carried.iter().zip(expected) {
            assert!(*name == wanted && (value - expected).abs() < 1e-6, "{carried:?}");
        }
        assert_eq!(carried.len(), 2);
    }
}

/// The statistics of a module that is called twice, of which the exporter left the second call.
#[test]
fn copies_of_running_statistics_are_renewed() {
    let mut copied = normalized(&[int("training_mode", 1)]);
    let graph = copied.graph.as_mut().expect("a graph");
    graph.node[0].input[3] = "m1".into();
    graph.node[0].input[4] = "v1".into();
    let copies = [node("Identity", &["m"], &["m1"]), node("Identity", &["v"], &["v1"])];
    graph.node.splice(0..0, copies.map(|n| n.with(&[])));
    let of = |model: &ModelProto| {
        let imported = import(model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
        let found = run(&imported, &[("x", x)]);
        let outputs = imported.graph.outputs.iter().zip(found);
        let carried = outputs.filter(|(o, _)| matches!(o.kind, OutputKind::Carry(_)));
        carried.map(|(o, x)| (o.name.clone(), x.to_f64s())).collect::<Vec<_>>()
    };
    let direct = of(&normalized(&[int("training_mode", 1)]));
    assert_eq!(direct.len(), 2);
    assert_eq!(of(&copied), direct);
}

#[test]
fn there_must_be_something_to_train() {
    let relu = model(vec![input("x", 1, &X)], vec![], vec![node("Relu", &["x"], &["y"])], &["y"]);
    let message = refused(&relu, &train());
    assert!(message.contains("no BatchNormalization"), "{message}");
}

#[test]
fn running_variances_of_pytorchs_models_are_unbiased() {
    for (producer, expected) in [("", 4.0 * 0.9 + 4.0 * 0.1), ("pytorch", 4.0 * 0.9 + 8.0 * 0.1)] {
        let mut model = normalized(&[int("training_mode", 1), float("momentum", 0.9)]);
        model.producer_name = producer.into();
        let imported = import(&model, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let x = Tensor::floats(DType::F32, [2, 1], vec![3.0, 7.0]);
        let found = run(&imported, &[("x", x)]);
        let at = imported.graph.outputs.iter().position(|o| o.name == "v").expect("the variance");
        let found = found[at].to_f64s()[0];
        assert!((found - expected).abs() < 1e-6, "{producer}: {found} is not {expected}");
    }
}

/// The model as the dynamo exporter describes it: the call that the node came from and what is listed.
fn described(mut model: ModelProto) -> ModelProto {
    let graph = model.graph.as_mut().expect("a graph");
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    let call = "%n : [num_users=3] = call_function[target=torch.ops.aten._native_batch_norm_legit_functional\
                .default](args = (%x, %p_s, %p_b, %b_m, %b_v, True, 0.1, 0.0), kwargs = {})";
    graph.node[0].metadata_props = vec![entry("pkg.torch.onnx.fx_node", call)];
    let signature = "p_s: PARAMETER target='s'\np_b: PARAMETER target='b'\nb_m: BUFFER target='m' \
                     persistent=True\nb_v: BUFFER target='v' persistent=True\n";
    let key = "pkg.torch.export.ExportedProgram.graph_signature";
    graph.metadata_props = vec![entry(key, signature)];
    model
}

#[test]
fn statistics_are_no_parameters_whatever_the_exporter_merged() {
    let model = described(normalized(&[]));
    assert_eq!(values(&model, &ImportOptions::default()).0, [2.5, 6.5]);
    let mut merged = model;
    let graph = merged.graph.as_mut().expect("a graph");
    // The scale and the running variance are both 4.
    graph.initializer =
        vec![floats("s", &[1], &[4.0]), floats("b", &[1], &[0.5]), floats("m", &[1], &[1.0])];
    graph.node[0].input[4] = "s".into();
    assert_eq!(values(&merged, &ImportOptions::default()).0, [4.5, 12.5]);
    let imported = import(&merged, &train()).unwrap_or_else(|e| panic!("{e}"));
    let carried = imported.graph.outputs.iter().filter(|o| matches!(o.kind, OutputKind::Carry(_)));
    assert_eq!(carried.map(|o| o.name.as_str()).collect::<Vec<_>>(), ["m", "v"]);
}

#[test]
fn normalization_by_stored_statistics_trains_nothing() {
    // As torchvision.ops.FrozenBatchNorm2d, and as a layer that normalizes data before it scales them.
    let frozen = vec![
        node("Reshape", &["v", "row"], &["v1"]),
        node("Add", &["v1", "onnx::eps"], &["v2"]),
        node("Sqrt", &["v2"], &["deviation"]),
        node("Reciprocal", &["deviation"], &["r"]),
        node("Mul", &["s", "r"], &["scale"]),
        node("Mul", &["m", "scale"], &["shift"]),
        node("Sub", &["b", "shift"], &["offset"]),
        node("Mul", &["x", "scale"], &["scaled"]),
        node("Add", &["scaled", "offset"], &["y"]),
    ];
    let trained = vec![
        node("Sub", &["x", "norm.running_mean"], &["centered"]),
        node("Add", &["norm.running_var", "onnx::eps"], &["v2"]),
        node("Sqrt", &["v2"], &["deviation"]),
        node("Div", &["centered", "deviation"], &["normal"]),
        node("Mul", &["normal", "s"], &["scaled"]),
        node("Add", &["scaled", "b"], &["y"]),
    ];
    // A root of data, and one of what is no stored tensor.
    let others = vec![
        node("Mul", &["x", "x"], &["square"]),
        node("Add", &["square", "v"], &["sum"]),
        node("Sqrt", &["sum"], &["root"]),
        node("Mul", &["s", "s"], &["s2"]),
        node("ReduceSum", &["s2"], &["length"]),
        node("Add", &["length", "onnx::eps"], &["l1"]),
        node("Sqrt", &["l1"], &["norm"]),
        node("Div", &["s", "norm"], &["direction"]),
        node("Mul", &["root", "direction"], &["y"]),
    ];
    for (nodes, names, expected) in [
        (frozen, ["v", "s", "m", "b"], vec![]),
        (trained, ["norm.running_mean", "norm.running_var", "s", "b"], vec!["b", "s"]),
        (others, ["v", "s", "m", "b"], vec!["s", "v"]),
    ] {
        let mut tensors: Vec<_> = names.iter().map(|n| floats(n, &[1, 3], &[1.0; 3])).collect();
        tensors.push(floats("onnx::eps", &[], &[1e-5]));
        tensors.push(ints("row", &[1, 3]));
        let x = input("x", 1, &[Dim::N(2), Dim::N(3)]);
        let mut m = model(vec![x], tensors, nodes, &["y"]);
        m.producer_name = "pytorch".into();
        let imported = import(&m, &ImportOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let params = imported.graph.params();
        let mut found: Vec<&str> = params
            .filter(|(_, p)| p.kind == ParamKind::Trainable)
            .map(|(_, p)| p.name.as_str())
            .collect();
        found.sort_unstable();
        assert_eq!(found, expected);
    }
}

/// `x[2, 1]` plus or times a stored `c[1]` beside a parameter, as the dynamo exporter describes it.
fn beside(op: &str, call: &str, kind: &str) -> ModelProto {
    let vector = |name: &str, value: f32| floats(name, &[1], &[value]);
    let nodes =
        vec![node(op, &["w", "c"], &["z"]).with(&[]), node("Mul", &["x", "z"], &["y"]).with(&[])];
    let weights = vec![vector("w", 2.0), vector("c", 5.0)];
    let mut model = model(vec![input("x", 1, &X)], weights, nodes, &["y"]);
    let graph = model.graph.as_mut().expect("a graph");
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: key.into(), value: value.into() };
    let call = format!(
        "%n : [num_users=1] = call_function[target=torch.ops.aten.{call}](args = (%p_w, %b_c), kwargs = {{}})"
    );
    graph.node[0].metadata_props = vec![entry("pkg.torch.onnx.fx_node", &call)];
    let signature = format!("p_w: PARAMETER target='w'\nb_c: {kind} target='c' persistent=True\n");
    let key = "pkg.torch.export.ExportedProgram.graph_signature";
    graph.metadata_props = vec![entry(key, &signature)];
    model
}

#[test]
fn buffers_and_constants_beside_a_parameter_are_themselves() {
    for kind in ["BUFFER", "CONSTANT_TENSOR"] {
        for (op, call, expected) in [("Add", "add.Tensor", 7.0), ("Mul", "mul.Tensor", 10.0)] {
            let (y, ..) = values(&beside(op, call, kind), &ImportOptions::default());
            assert_eq!(y, [3.0 * expected, 7.0 * expected], "{kind} {op}");
        }
    }
}
