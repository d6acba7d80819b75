//! Every diagnostic code is in one table, with its meaning, its remedy, and the test that raises it.

use crate::support::file;
use crate::tidy;
use clap::Parser;
use expect_test::expect_file;
use frit::commands::{Cli, execute};
use frit_ir::{Code, codes};
use std::path::{Path, PathBuf};

/// A model `y = x·w` in JSON, or what stands at its places.
struct Json {
    input: &'static str,
    more_inputs: &'static str,
    nodes: &'static str,
    dtype: &'static str,
}

const MATMUL: &str = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["y"]}"#;
const JSON: Json = Json { input: "[2, 4]", more_inputs: "", nodes: MATMUL, dtype: "f32" };

impl Json {
    fn write(&self, dir: &Path, name: &str) {
        let Json { input, more_inputs, nodes, dtype } = self;
        let text = format!(
            r#"{{"frit_model": 1, "name": "m", "nodes": [{nodes}], "outputs": ["y"],
                "inputs": [{{"name": "x", "dtype": "{dtype}", "shape": {input}}}{more_inputs}],
                "params": [{{"name": "w", "dtype": "{dtype}", "shape": [4, 4], "init": "ones"}}]}}"#
        );
        std::fs::write(dir.join(name), text).expect("written");
    }
}

/// A folder of models and other files.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path();
        JSON.write(path, "linear.json");
        let integers = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
            {"op": "cast", "inputs": ["h"], "outputs": ["y"], "attrs": {"to": "i64"}}"#;
        let empty = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
            {"op": "slice", "inputs": ["h"], "outputs": ["y"],
             "attrs": {"start": [0, 0], "size": [2, 0], "step": [1, 1]}}"#;
        let added = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
            {"op": "add", "inputs": ["h", "labels"], "outputs": ["y"]}"#;
        let erf = r#"{"op": "cast", "inputs": ["x"], "outputs": ["a"], "attrs": {"to": "f64"}},
            {"op": "erf", "inputs": ["a"], "outputs": ["b"]},
            {"op": "cast", "inputs": ["b"], "outputs": ["c"], "attrs": {"to": "f32"}},
            {"op": "matmul", "inputs": ["c", "w"], "outputs": ["y"]}"#;
        let statistics = r#"{"op": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
            {"op": "rms_norm", "inputs": ["h", "w"], "outputs": ["n", "y"],
             "attrs": {"axis": 0, "eps": 0.1}}"#;
        let labels = r#", {"name": "labels", "dtype": "f32", "shape": [1, 4]}"#;
        let classes = r#", {"name": "labels", "dtype": "i64", "shape": [4, 4]}"#;
        for (name, model) in [
            ("integers.json", Json { nodes: integers, ..JSON }),
            ("empty.json", Json { nodes: empty, ..JSON }),
            ("labelled.json", Json { nodes: added, more_inputs: labels, ..JSON }),
            ("cube.json", Json { input: "[4, 4, 4]", more_inputs: classes, ..JSON }),
            ("double.json", Json { dtype: "f64", ..JSON }),
            ("erf.json", Json { nodes: erf, ..JSON }),
            ("large.json", Json { input: "[131072, 4]", ..JSON }),
            ("statistics.json", Json { nodes: statistics, input: "[4, 4]", ..JSON }),
        ] {
            model.write(path, name);
        }
        let huge = r#"{"frit_model": 1, "name": "m", "outputs": ["y"],
            "inputs": [{"name": "x", "dtype": "f32", "shape": [2, 1048576]}],
            "params": [{"name": "w", "shape": [1048576, 1048576], "init": "ones"},
                       {"name": "b", "shape": [1048576], "init": "ones"}],
            "nodes": [{"op": "matmul", "inputs": ["x", "w"], "outputs": ["h"]},
                      {"op": "add", "inputs": ["h", "b"], "outputs": ["y"]}]}"#;
        for (name, text) in [
            ("huge.json", huge),
            ("cut.json", "{"),
            (
                "version.json",
                r#"{"frit_model": 9, "name": "m", "inputs": [], "params": [], "nodes": [], "outputs": []}"#,
            ),
            ("garbage.onnx", "not a model"),
            ("garbage.pt2", "PK\u{3}\u{4} not a model"),
            ("cut.toml", "[[["),
            ("cluster.toml", "base = \"h100\"\nnonsense = 1\n"),
            ("numerics.json", "{}"),
        ] {
            std::fs::write(path.join(name), text).expect("written");
        }
        std::fs::create_dir(path.join("folder")).expect("made");
        Place(dir)
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).to_string_lossy().into_owned()
    }

    /// Runs a command, in which `@` stands for this folder.
    fn frit(&self, line: &str) -> Result<String, Vec<String>> {
        let words = line.split_whitespace().map(|w| w.replace('@', &self.file("")));
        let cli = Cli::try_parse_from(std::iter::once("frit".into()).chain(words));
        let cli = cli.unwrap_or_else(|e| panic!("{line}: {e}"));
        execute(&cli).map_err(|report| report.diagnostics.into_iter().map(|d| d.code).collect())
    }

    fn raises(&self, code: &str, line: &str) {
        match self.frit(line) {
            Ok(text) => panic!("{code}: {line} is accepted: {text}"),
            Err(codes) => {
                assert!(codes.iter().any(|c| c == code), "{line} is {codes:?}, not {code}")
            }
        }
    }

    fn plan(&self, name: &str, settings: &str) {
        let line = format!("compile @linear.json -o @{name} {LOSS} {settings}");
        self.frit(&line).unwrap_or_else(|codes| panic!("{line}: {codes:?}"));
    }
}

const LOSS: &str = "--set loss.logits=y --set loss.kind=mse";

#[test]
fn models_and_command_lines() {
    let place = Place::new();
    let mlp = file("tests/models/mlp/model.onnx");
    let mlp = mlp.display();
    let batch = "--bind batch=4";
    for (code, line) in [
        ("E010", "@gone.onnx".into()),
        ("E011", "@garbage.onnx".into()),
        ("E035", "@garbage.pt2".into()),
        ("E036", format!("{mlp} {batch} --set model.batch_norm=train")),
        ("E040", "@cut.json".into()),
        ("E041", "@version.json".into()),
        ("E060", format!("@statistics.json {LOSS}")),
        ("E061", format!("@empty.json {LOSS}")),
        ("E080", format!("@double.json {LOSS}")),
        ("E081", format!("@huge.json {LOSS}")),
        ("E099", format!("@erf.json {LOSS} --set target.device=cuda")),
        ("E212", format!("@integers.json {LOSS}")),
        ("E215", format!("@labelled.json {LOSS}")),
        ("E216", "@cube.json --set loss.logits=y --set loss.kind=cross_entropy".into()),
        ("E096", format!("@linear.json {LOSS} --disable-pass nonsense")),
        ("E097", format!("@linear.json {LOSS} --bind batch")),
        ("E098", format!("@linear.json {LOSS} --disable-pass differentiate")),
    ] {
        place.raises(code, &format!("compile {line} -o @plan"));
    }
    place.raises("E090", &format!("compile @linear.json {LOSS} -o @folder"));
    place.raises("E091", &format!("compile @linear.json {LOSS} -o @cut.json/plan"));
}

#[test]
fn configurations() {
    let place = Place::new();
    for (code, settings) in [
        ("E050", "--config @cut.toml"),
        ("E051", "--set optimizer.lr=fast"),
        ("E052", "--set optimizer.lrr=1"),
        ("E053", "--set schedule.kind=cosine"),
        ("E055", "--set target.arch=pentium"),
        ("E057", "--set memory.offload=auto"),
        ("E058", "--set memory.budget=10"),
        ("E063", "--set precision.loss_scale=0 --set precision.compute=fp16"),
        ("E064", "--set params.frozen=[\"**\"]"),
        ("E066", "--set sharding.wrap=nothing.* --set sharding.ranks=2"),
        ("E213", "--set loss.kind=cross_entropy --set loss.class_axis=5"),
        ("E214", "--set loss.kind=output"),
        ("E220", "--set precision.compute=bf16 --set sharding.param_dtype=fp16"),
    ] {
        place.raises(code, &format!("compile @linear.json {LOSS} {settings} -o @plan"));
    }
    let many = "--set run.accumulation=1048576 --set sharding.ranks=65536";
    place.raises("E071", &format!("compile @large.json {LOSS} {many} -o @plan"));
}

#[test]
fn plans_and_what_is_done_with_them() {
    let place = Place::new();
    place.plan("plan", "");
    place.plan("single", "--set precision.compute=fp32");
    for (plan, change) in [("cut", "{"), ("edited", "")] {
        place.plan(plan, "");
        let file = place.file(&format!("{plan}/plan.json"));
        let text = std::fs::read_to_string(&file).expect("a plan");
        let edited = text.replacen("\"seed\": ", "\"seed\": 1", 1);
        std::fs::write(file, if change.is_empty() { &edited } else { change }).expect("written");
    }
    let model = file("tests/models/mlp/model.onnx");
    let compiled = |model: &Path, to: &str, settings: &str| {
        let line = format!("compile {} --bind batch=4 -o @{to} {settings}", model.display());
        place.frit(&line).unwrap_or_else(|codes| panic!("{line}: {codes:?}"));
    };
    compiled(&model, "broken", "");
    std::fs::copy(place.file("garbage.onnx"), place.file("broken/source/model.onnx"))
        .expect("copied");
    for (code, line) in [
        ("E056", "simulate @plan --cluster @cluster.toml"),
        ("E092", "verify @gone"),
        ("E093", "verify @cut"),
        ("E094", "verify @edited"),
        ("E100", "run @plan --data @gone.safetensors"),
        ("E102", "inspect @plan --numerics @numerics.json"),
        ("E110", "export @broken --weights @broken/weights.safetensors -o @model.onnx"),
        ("E111", "export @plan --weights @gone.safetensors -o @model.onnx"),
        ("E112", "export @plan --weights @plan/weights.safetensors -o @model.onnx"),
        ("E113", "bench @single"),
        ("E097", "explain E999"),
    ] {
        place.raises(code, line);
    }
}

#[test]
fn codes_are_explained() {
    let place = Place::new();
    let said = place.frit("explain e014").expect("a code");
    assert!(
        said.contains("OperandMismatch") && said.contains("cannot take its operands"),
        "{said}"
    );
    let said = place.frit("explain P303").expect("a code");
    assert!(said.contains("invariant") && said.contains("scale / (C·A)"), "{said}");
    let said = place.frit("explain L02").expect("a lint");
    assert!(said.contains("f16 without loss scaling"), "{said}");
}

#[test]
fn the_page_is_the_table() {
    expect_file![file("docs/errors.md")].assert_eq(&codes::document());
}

/// All sources of tests and libraries.
fn sources() -> Vec<(String, String)> {
    let folders = ["ir", "passes", "kernels", "runtime", "compiler", "tests"];
    let paths = folders.into_iter().flat_map(|folder| tidy::sources(&file(folder)));
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("text");
        (path.to_string_lossy().into_owned(), text)
    };
    paths.map(read).collect()
}

#[test]
fn every_code_is_unique_and_raised_by_the_test_that_it_names() {
    let sources = sources();
    for (i, code) in Code::ALL.iter().enumerate() {
        let twice = Code::ALL[..i].iter().any(|c| c.id() == code.id());
        assert!(!twice, "{code} is there twice");
        assert!(code.id().len() == 4 && code.is_internal() != code.id().starts_with(['E', 'W']));
        let head = format!("fn {}(", code.test());
        let raised =
            sources.iter().any(|(_, text)| text.contains(&head) && text.contains(code.id()));
        assert!(raised, "no test `{}` names {code}", code.test());
        let named = format!("Code::{}", code.name());
        let used =
            sources.iter().any(|(path, text)| !path.contains("/tests/") && text.contains(&named));
        assert!(used, "nothing raises {code}, {named}");
    }
}

/// The files that prove invariants open with these, as the table has them.
#[test]
fn invariants_are_stated_where_they_are_checked() {
    let mut n = 0;
    for (path, text) in sources() {
        if !path.contains("/verify/") && !path.contains("/verify_plan/") {
            continue;
        }
        let mut stated: Vec<(String, String)> = Vec::new();
        for line in text.lines().map_while(|line| line.strip_prefix("//!")) {
            match line.trim_start().split_once("  ") {
                Some((id, says)) if Code::find(id).is_some() => {
                    stated.push((id.into(), says.into()))
                }
                _ if line.starts_with("       ") => {
                    if let Some((_, says)) = stated.last_mut() {
                        *says += &format!(" {}", line.trim());
                    }
                }
                _ => {}
            }
        }
        for (id, says) in stated {
            let code = Code::find(&id).expect("it was found before");
            assert_eq!(says, code.meaning(), "{path}: {id}");
            n += 1;
        }
    }
    let proved = Code::ALL.iter().filter(|c| c.id().starts_with(['V', 'P'])).count();
    // What `check` and the provenance of tasks say is no file's own.
    assert_eq!(n, proved - 2);
}
