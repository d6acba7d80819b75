//! Tests of JSON models.

use super::{expand, import, json_schema};
use crate::import::{ImportOptions, Imported};
use frit_ir::interpret::{self, Options};
use frit_ir::ops::ParamKind;
use frit_ir::{Op, Tensor};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

fn file(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn load(text: &str, binds: &[(&str, usize)]) -> Result<Imported, String> {
    let binds = binds.iter().map(|(k, v)| (k.to_string(), *v)).collect();
    let options = ImportOptions { binds, frozen: vec!["h.0.**".into()], ..Default::default() };
    import(text.as_bytes(), "m.json", &options).map_err(|report| report.to_string())
}

/// The model of `docs/json-model.md`.
fn example() -> String {
    let doc = std::fs::read_to_string(file("docs/json-model.md")).expect("the page");
    let (_, rest) = doc.split_once("```json\n").expect("an example");
    rest.split_once("```").expect("its end").0.to_string()
}

#[test]
fn the_documented_example_is_a_model() {
    let imported = load(&example(), &[("batch", 2), ("seq", 4)]).unwrap();
    let graph = &imported.graph;
    assert_eq!(graph.ty(graph.outputs[0].value).to_string(), "f32[2, 4, 257]");
    let params: Vec<String> =
        graph.params().map(|(_, p)| format!("{} {} {:?}", p.name, p.ty.shape, p.kind)).collect();
    assert_eq!(
        params,
        [
            "wte [257, 64] Trainable",
            "ln_f.weight [64] Trainable",
            "ln_f.bias [64] Trainable",
            "h.0.fc.weight [64, 256] Frozen",
            "h.0.proj.weight [256, 64] Frozen",
            "h.1.fc.weight [64, 256] Trainable",
            "h.1.proj.weight [256, 64] Trainable",
        ]
    );
    let scopes: Vec<&str> = graph.nodes().map(|(_, n)| &*n.origin.scope).collect();
    assert!(scopes.contains(&"h.1.mlp") && scopes.contains(&"h.0"), "{scopes:?}");
    assert!(graph.nodes().any(|(_, n)| &*n.origin.source == "fc"));
}

#[test]
fn each_copy_of_a_block_draws_numbers_of_its_own() {
    let model = |inputs: &str, id: &str| {
        format!(
            r#"{{"frit_model": 1, "name": "m", "dims": {{"batch": null}},
              "inputs": [{{"name": "x", "dtype": "f32", "shape": ["batch", 4]}}],
              "nodes": [
                {{"op": "constant", "outputs": ["zero"], "attrs": {{"ty": {{"dtype": "f32", "shape": []}}, "splat": 0}}}},
                {{"repeat": 2, "carry": ["x"], "nodes": [
                  {{"op": "random_mask", "inputs": [{inputs}], "outputs": ["mask"], "attrs": {{"shape": ["batch", 4], "keep": 0.5{id}}}}},
                  {{"op": "select", "inputs": ["mask", "x", "zero"], "outputs": ["x"]}}]}}],
              "outputs": ["x"]}}"#
        )
    };
    let ids = |text: &str| -> Vec<u32> {
        let graph = load(text, &[("batch", 2)]).unwrap_or_else(|e| panic!("{e}")).graph;
        frit_ir::verify::verify(&graph).unwrap_or_else(|broken| panic!("{broken:?}"));
        let masks = graph.nodes().filter_map(|(_, n)| match &n.op {
            frit_ir::Op::RandomMask(mask) => Some(mask.id),
            _ => None,
        });
        masks.collect()
    };
    assert_eq!(ids(&model("", "")), [0, 1]);
    assert_eq!(ids(&model("", ", \"id\": 7")), [7, 7]);
    let first = "{\"repeat\": 2, \"carry\": [\"x\"], \"nodes\": [";
    let stated = "{\"op\": \"random_mask\", \"outputs\": [\"_\"], \"attrs\": {\"shape\": [1], \"keep\": 0.5, \"id\": 0}},";
    let text = model("", "").replacen(
        "]}],\n              \"outputs\"",
        "]}, STATED],\n              \"outputs\"",
        1,
    );
    let text = text.replacen(", STATED", &format!(", {}", stated.trim_end_matches(',')), 1);
    assert!(text.contains(first) && text.contains("\"id\": 0"));
    let error = load(&text, &[("batch", 2)]).unwrap_err().to_string();
    assert!(error.contains("number all draws, or none"), "{error}");
    let error = load(&model("\"x\"", ""), &[("batch", 2)]).unwrap_err().to_string();
    assert!(error.contains("the state must be i64[5]"), "{error}");
}

#[test]
fn the_documented_gradient_is_that_of_a_model() {
    let doc = std::fs::read_to_string(file("docs/custom-gradients.md")).expect("the page");
    let (_, rest) = doc.split_once("```json\n").expect("an example");
    let (text, _) = rest.split_once("```").expect("its end");
    let imported = load(text, &[("batch", 2)]).unwrap();
    frit_ir::verify::verify(&imported.graph).unwrap_or_else(|broken| panic!("{broken:?}"));
    let text = imported.graph.to_string();
    assert!(text.contains("= custom_gradient") && text.contains("splat = 0.5"), "{text}");
}

#[test]
fn functions_read_only_their_inputs_and_have_names_of_their_own() {
    let model = |functions: &str, nodes: &str| {
        format!(
            r#"{{"frit_model": 1, "name": "m", "inputs": [{{"name": "x", "dtype": "f32", "shape": [2]}}],
            "functions": [{functions}], "nodes": [{nodes}], "outputs": ["y"]}}"#
        )
    };
    let twice = r#"{"name": "twice", "inputs": ["a"], "outputs": ["x"],
        "nodes": [{"op": "add", "inputs": ["a", "a"], "outputs": ["x"]}]}"#;
    let call = r#"{"call": "twice", "inputs": ["x"], "outputs": ["h"]},
        {"call": "twice", "inputs": ["h"], "outputs": ["y"]}"#;
    let imported = load(&model(twice, call), &[]).unwrap();
    let x = Tensor::floats(frit_ir::DType::F32, [2], vec![1.0, -3.0]);
    let feeds = HashMap::from([("x".to_string(), x)]);
    let y = interpret::run(&imported.graph, &feeds, Options::default()).unwrap().remove(0).1;
    assert_eq!(y.to_f64s(), [4.0, -12.0]);
    for (functions, nodes, message) in [
        (twice.replace(r#""a", "a""#, r#""a", "h""#), call, "no value `h`"),
        (format!("{twice}, {twice}"), call, "two functions are named `twice`"),
        (
            twice.replace(r#""outputs": ["x"],"#, r#""outputs": ["_"],"#),
            call,
            "only a gradient function",
        ),
        (
            twice.into(),
            r#"{"call": "twice", "op": "add", "inputs": ["x"], "outputs": ["y"]}"#,
            "one of",
        ),
        (twice.into(), r#"{"call": "twice", "inputs": ["x"], "outputs": ["y", "z"]}"#, "1 results"),
    ] {
        let error = load(&model(&functions, nodes), &[]).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn repeats_compute_what_they_say() {
    let text = r#"{ "frit_model": 1, "name": "r", "dims": {"n": 3},
      "inputs": [{"name": "x", "dtype": "f32", "shape": ["n"]}],
      "nodes": [
        {"op": "constant", "outputs": ["one"],
         "attrs": {"ty": {"dtype": "f32", "shape": []}, "splat": 1}},
        {"repeat": 2, "scope": "o.{i}", "carry": ["x"], "nodes": [
          {"repeat": "n", "index": "j", "scope": "p.{j}", "carry": ["x"], "nodes": [
            {"op": "add", "inputs": ["x", "x"], "outputs": ["x"], "id": "n{i}{j}"}]},
          {"op": "sub", "inputs": ["x", "one"], "outputs": ["x"]}]}],
      "outputs": ["x"] }"#;
    let imported = load(text, &[]).unwrap();
    let x = Tensor::floats(frit_ir::DType::F32, [3], vec![1.0, 2.0, 3.0]);
    let feeds = HashMap::from([("x".to_string(), x)]);
    let outputs = interpret::run(&imported.graph, &feeds, Options::default()).unwrap();
    // Twice: x ← 8x − 1.
    assert_eq!(outputs[0].1.to_f64s(), [55.0, 119.0, 183.0]);
    let origins: Vec<String> = imported.graph.nodes().map(|(_, n)| n.origin.to_string()).collect();
    assert!(origins.contains(&"node \"n12\" in scope `o.1.p.2`".to_string()), "{origins:?}");
}

#[test]
fn sizes_of_parts_are_no_shape() {
    let text = r#"{ "frit_model": 1, "name": "s", "dims": {"w": 16384},
      "inputs": [{"name": "x", "dtype": "f32", "shape": [1, "3*w"]}],
      "nodes": [{"op": "split", "inputs": ["x"], "outputs": ["a", "b", "c"],
                 "attrs": {"axis": 1, "sizes": ["w", "w", "w"]}}],
      "outputs": ["c"] }"#;
    let graph = load(text, &[]).unwrap().graph;
    assert_eq!(graph.ty(graph.outputs[0].value).to_string(), "f32[1, 16384]");
}

#[test]
fn errors_have_line_column_and_path() {
    let model = |nodes: &str| {
        format!(
            "{{ \"frit_model\": 1, \"name\": \"m\", \"dims\": {{\"n\": 4}},\n\"inputs\": [{{\"name\": \"x\", \
             \"dtype\": \"f32\", \"shape\": [\"n\"]}}],\n\"nodes\": [\n{nodes}\n],\n\"outputs\": [\"y\"] }}"
        )
    };
    for (nodes, expected) in [
        (
            "{\"op\": \"rely\", \"inputs\": [\"x\"], \"outputs\": [\"y\"]}",
            "m.json:4:8: nodes[0].op: unknown operation `rely`",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": [\"X\"], \"outputs\": [\"y\"]}",
            "m.json:4:27: nodes[0].inputs[0]: there is no value `X` here; did you mean `x`?",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": [\"x\"], \"outputs\": [\"x\"]}",
            "nodes[0].outputs[0]: the name `x` is used twice",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": [\"x\"], \"outputs\": [\"y\", \"z\"]}",
            "`relu` has 1 results, but 2 names",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": [\"x\", \"x\"], \"outputs\": [\"y\"]}",
            "m.json:4:1: nodes[0]: relu: expected 1 operands, found 2",
        ),
        (
            "{\"op\": \"softmax\", \"inputs\": [\"x\"], \"outputs\": [\"y\"], \"attrs\": {\"axes\": 0}}",
            "nodes[0].attrs: `softmax`: unknown field `axes`",
        ),
        (
            "{\"op\": \"reshape\", \"inputs\": [\"x\"], \"outputs\": [\"y\"], \"attrs\": {\"shape\": [\"m\", 2]}}",
            "nodes[0].attrs.shape[0]: the dimension `m` has no value",
        ),
        (
            "{\"op\": \"all_reduce\", \"inputs\": [\"x\"], \"outputs\": [\"y\"]}",
            "is reserved for Frit",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": [\"x\"], \"output\": [\"y\"]}",
            "m.json:4:40: nodes[0]: unknown field `output`",
        ),
        (
            "{\"op\": \"relu\", \"inputs\": 3, \"outputs\": [\"y\"]}",
            "m.json:4:26: nodes[0].inputs: invalid type: integer `3`",
        ),
        ("{\"inputs\": [\"x\"]}", "a node needs one of `op`, `call` and `repeat`"),
        (
            "{\"repeat\": 2, \"carry\": [\"x\"], \"nodes\": [{\"op\": \"relu\", \"inputs\": [\"x\"], \"outputs\": [\"z\"]}]}",
            "nodes[0].carry[0]: the block does not redefine the carried value `x`",
        ),
        (
            "{\"repeat\": 2, \"nodes\": [{\"op\": \"relu\", \"inputs\": [\"x\"], \"outputs\": [\"x\"]}]}",
            "only names in `carry`",
        ),
        (
            "{\"repeat\": 2, \"params\": [{\"name\": \"w\", \"shape\": [4]}], \"nodes\": []}",
            "the name `w` is used twice",
        ),
        ("{\"repeat\": 99999999, \"nodes\": []}", "nodes[0]: the import would make"),
        (
            "{\"repeat\": 999999, \"nodes\": [{\"repeat\": 999999, \"index\": \"j\", \"nodes\": []}]}",
            "import.max_bytes",
        ),
        (
            "{\"repeat\": 999999, \"carry\": [\"x\"], \"nodes\": [{\"op\": \"relu\", \"inputs\": [\"x\"], \"outputs\": [\"x\"]}]}",
            "nodes[0].nodes[0]: the import would make 65537 nodes, import.max_nodes = 65536",
        ),
        (
            "{\"op\": \"constant\", \"outputs\": [\"y\"], \"attrs\": {\"ty\": {\"dtype\": \"f32\", \"shape\": [4294967296, 4294967296]}, \"splat\": 0}}",
            "too large",
        ),
        (
            "{\"op\": \"expand\", \"inputs\": [\"x\"], \"outputs\": [\"y\"], \"attrs\": {\"shape\": [1e30]}}",
            "is not a size",
        ),
        (
            "{\"op\": \"constant\", \"outputs\": [\"y\"], \"attrs\": {\"ty\": {\"dtype\": \"f32\", \"shape\": [99999999]}, \"splat\": 0}}",
            "the constant is too large",
        ),
        ("", "m.json:6:1: outputs[0]: there is no value `y`"),
    ] {
        let found = load(&model(nodes), &[]).unwrap_err();
        let expected = expected.replace("m.json:6:1: outputs", "m.json:6:13: outputs");
        assert!(found.contains(&expected), "{expected}\n is not in\n{found}");
    }
    let found = load(
        "{ \"frit_model\": 2, \"name\": \"m\", \"inputs\": [], \"nodes\": [], \"outputs\": [] }",
        &[],
    );
    assert!(found.unwrap_err().contains("m.json:1:17: frit_model: version 2 is not known"));
    assert!(load("{ \"frit_model\": 1,\n oops", &[]).unwrap_err().contains("m.json:2:"));
    let found = load(&example(), &[("batches", 2)]).unwrap_err();
    assert!(found.contains("dims.batch: dimension `batch` has no size"), "{found}");
    assert!(
        found.contains("--bind batch=N") && found.contains("unknown dimension `batches`"),
        "{found}"
    );
}

#[test]
fn names_of_a_block_end_with_it() {
    let text = r#"{ "frit_model": 1, "name": "m",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [4]}],
      "nodes": [
        {"repeat": 2, "carry": ["x"], "nodes": [
          {"op": "relu", "inputs": ["x"], "outputs": ["t"]},
          {"op": "neg", "inputs": ["t"], "outputs": ["x"]}]},
        {"op": "abs", "inputs": ["x"], "outputs": ["t"]}],
      "outputs": ["t"] }"#;
    let graph = load(text, &[]).unwrap().graph;
    let ops: Vec<&str> = graph.nodes().map(|(_, n)| n.op.name()).collect();
    assert_eq!(ops, ["input", "relu", "neg", "relu", "neg", "abs"]);
    let unknown = text.replace("\"abs\", \"inputs\": [\"x\"]", "\"abs\", \"inputs\": [\"t\"]");
    assert!(load(&unknown, &[]).unwrap_err().contains("there is no value `t` here"));
}

#[test]
fn damaged_texts_do_not_crash() {
    let text = example();
    let binds = [("batch", 2), ("seq", 4)];
    assert!(load(&text, &binds).is_ok());
    for n in (0..text.len()).filter(|n| text.is_char_boundary(*n)) {
        assert!(load(&text[..n], &binds).is_err() || text[n..].trim().is_empty());
        for byte in [b'9', b'-', b'"', b'x'] {
            let mut damaged = text.clone().into_bytes();
            damaged[n] = byte;
            let _ = load(&String::from_utf8_lossy(&damaged), &binds);
        }
    }
}

#[test]
fn frozen_and_integer_parameters() {
    let text = r#"{ "frit_model": 1, "name": "p", "inputs": [],
      "params": [{"name": "w", "shape": [2], "trainable": false, "init": {"uniform": {"bound": 1}}}],
      "nodes": [], "outputs": ["w"] }"#;
    let imported = load(text, &[]).unwrap();
    let (_, param) = imported.graph.params().next().unwrap();
    assert_eq!(param.kind, ParamKind::Frozen);
    assert!(param.reason.contains("trainable: false"));
    let ints = text.replace("\"shape\": [2]", "\"shape\": [2], \"dtype\": \"i64\"");
    assert!(load(&ints, &[]).unwrap_err().contains("a parameter of type i64 cannot train"));
}

#[test]
fn the_checked_in_schema_is_current() {
    expect_test::expect_file![file("docs/frit-model.schema.json")].assert_eq(&json_schema());
}

/// docs/json-model.md has every operation that a model may use, with its attributes.
#[test]
fn the_page_lists_all_operations() {
    let page = std::fs::read_to_string(file("docs/json-model.md")).unwrap();
    let rows = page.split_once("| family |").expect("the table").1;
    let rows = rows.split_once("\n\n").expect("its end").0;
    let in_backticks: Vec<&str> = rows.split('`').skip(1).step_by(2).collect();
    let listed: BTreeSet<&str> = in_backticks.iter().flat_map(|t| t.split_whitespace()).collect();
    let allowed: Vec<&str> = Op::names().into_iter().filter(|n| !expand::is_reserved(n)).collect();
    let mut missing: Vec<String> = Vec::new();
    missing.extend(allowed.iter().filter(|n| !listed.contains(*n)).map(|n| n.to_string()));
    for op in Op::examples() {
        let (name, attributes) = op.to_parts();
        let keys = attributes.keys().filter(|key| !listed.contains(key.as_str()));
        if allowed.contains(&name) {
            missing.extend(keys.map(|key| format!("{key} of {name}")));
        }
    }
    assert_eq!(missing, Vec::<String>::new(), "not on the page");
    for name in Op::names().into_iter().filter(|n| expand::is_reserved(n)) {
        assert!(!listed.contains(name), "no model may use `{name}`");
    }
}

#[test]
fn the_given_json_models_import() {
    for (model, binds) in [("digits_mlp", vec![("batch", 4)]), ("char_gpt2", vec![("batch", 2)])] {
        let text = std::fs::read_to_string(file(&format!("examples/{model}/model.json"))).unwrap();
        let imported = load(&text, &binds).unwrap_or_else(|e| panic!("{model}: {e}"));
        assert!(imported.graph.params().count() > 3, "{model}");
    }
}
