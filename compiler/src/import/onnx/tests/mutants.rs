//! Mutants of models: whatever they ask for, the importer gives a graph or an error.
//!
//! Seeded, so that a failure can be repeated. `FRIT_SEEDS` names a folder of further models, `FRIT_MUTANTS` a number
//! of mutants, `FRIT_MUTANTS_FROM` the first.

use super::build::*;
use super::control::{flag, graph, inside, scalar};
use crate::import::onnx::messages::*;
use prost::Message;
use prost::bytes::Bytes;
use std::path::{Path, PathBuf};

/// Mutants of a run.
const MUTANTS: u64 = 400;

/// Choices that follow from a seed.
struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n.max(1))
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        let at = self.below(from.len());
        from.get(at).cloned()
    }

    /// A number at which code goes wrong.
    fn integer(&mut self) -> i64 {
        const ODD: [i64; 18] = [
            0,
            1,
            -1,
            2,
            3,
            7,
            -2,
            64,
            255,
            65_536,
            1 << 22,
            1 << 31,
            1 << 40,
            -(1 << 40),
            1 << 62,
            i64::MAX,
            i64::MIN,
            i64::MIN + 1,
        ];
        match self.below(3) {
            0 => self.below(9) as i64 - 2,
            _ => ODD[self.below(ODD.len())],
        }
    }

    fn float(&mut self) -> f32 {
        const ODD: [f32; 12] = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1e-30,
            1e18,
            -1e30,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
        ];
        ODD[self.below(ODD.len())]
    }
}

fn mutate(model: &mut ModelProto, all: &[&'static str], random: &mut Random) {
    let Some(outer) = model.graph.as_mut() else { return };
    // Now and then a graph inside.
    let mut graph = outer;
    while random.below(3) == 0 {
        let holds = |n: &NodeProto| n.attribute.iter().any(|a| a.g.is_some());
        if !graph.node.iter().any(holds) {
            break;
        }
        let inside =
            graph.node.iter_mut().flat_map(|n| &mut n.attribute).filter_map(|a| a.g.as_mut());
        match inside.last() {
            Some(inside) => graph = inside,
            None => return,
        }
    }
    let nodes = graph.node.len();
    let names: Vec<String> = graph
        .node
        .iter()
        .flat_map(|n| n.output.iter().chain(&n.input))
        .chain(graph.initializer.iter().map(|t| &t.name))
        .chain(graph.input.iter().map(|i| &i.name))
        .cloned()
        .collect();
    let at = random.below(nodes);
    match random.below(14) {
        0 => {
            if let (Some(node), Some(op)) = (graph.node.get_mut(at), random.pick(all)) {
                node.op_type = op.into();
            }
        }
        1 | 2 => {
            let (integer, float) = (random.integer(), random.float());
            let Some(node) = graph.node.get_mut(at) else { return };
            let which = random.below(node.attribute.len());
            let Some(attribute) = node.attribute.get_mut(which) else { return };
            let i = random.below(attribute.ints.len());
            match attribute.ints.get_mut(i) {
                Some(one) => *one = integer,
                None => (attribute.i, attribute.f) = (integer, float),
            }
        }
        3 => {
            let Some(node) = graph.node.get_mut(at) else { return };
            if !node.attribute.is_empty() {
                node.attribute.remove(random.below(node.attribute.len()));
            }
        }
        4 => {
            let Some(node) = graph.node.get_mut(at) else { return };
            let (from, to) = (random.below(node.input.len()), random.pick(&names));
            if let (Some(input), Some(to)) = (node.input.get_mut(from), to) {
                *input = if random.below(5) == 0 { String::new() } else { to };
            }
        }
        5 => {
            let Some(node) = graph.node.get_mut(at) else { return };
            match (random.below(2), random.pick(&names)) {
                (0, Some(name)) => node.input.push(name),
                _ => drop(node.input.pop()),
            }
        }
        6 | 7 => {
            let integer = random.integer();
            let which = random.below(graph.input.len());
            let ty = graph.input.get_mut(which).and_then(|i| i.r#type.as_mut());
            let Some(ty) = ty.and_then(|t| t.tensor_type.as_mut()) else { return };
            if random.below(4) == 0 {
                ty.elem_type = random.pick(&[1, 2, 6, 7, 9, 10, 11, 16, 3]).unwrap_or(1);
                return;
            }
            let Some(shape) = ty.shape.as_mut() else { return };
            match random.below(6) {
                0 => drop(shape.dim.pop()),
                1 => shape.dim.push(DimensionProto { dim_value: Some(integer), dim_param: None }),
                _ => {
                    let i = random.below(shape.dim.len());
                    if let Some(dim) = shape.dim.get_mut(i) {
                        dim.dim_value = Some(integer);
                    }
                }
            }
        }
        8..=10 => {
            let (integer, float) = (random.integer(), random.float());
            let attributes = graph.node.iter_mut().flat_map(|n| &mut n.attribute);
            let constants = attributes.filter_map(|a| a.t.as_deref_mut());
            let mut tensors: Vec<&mut TensorProto> =
                graph.initializer.iter_mut().chain(constants).collect();
            let which = random.below(tensors.len());
            let Some(tensor) = tensors.get_mut(which) else { return };
            match random.below(8) {
                0 => tensor.data_type = random.pick(&[1, 2, 6, 7, 9, 10, 11, 16, 3]).unwrap_or(1),
                1 => {
                    let i = random.below(tensor.dims.len());
                    if let Some(dim) = tensor.dims.get_mut(i) {
                        *dim = integer;
                    }
                }
                _ => {
                    let bytes = match tensor.data_type {
                        7 => integer.to_le_bytes().to_vec(),
                        6 => (integer as i32).to_le_bytes().to_vec(),
                        11 => f64::from(float).to_le_bytes().to_vec(),
                        1 => float.to_le_bytes().to_vec(),
                        _ => vec![integer as u8],
                    };
                    let mut raw = tensor.raw_data.clone().unwrap_or_default().to_vec();
                    let i = random.below(raw.len() / bytes.len().max(1)) * bytes.len();
                    if let Some(place) = raw.get_mut(i..i + bytes.len()) {
                        place.copy_from_slice(&bytes);
                        tensor.raw_data = Some(Bytes::from(raw));
                    }
                    let i = random.below(tensor.int64_data.len());
                    if let Some(one) = tensor.int64_data.get_mut(i) {
                        *one = integer;
                    }
                    let i = random.below(tensor.float_data.len());
                    if let Some(one) = tensor.float_data.get_mut(i) {
                        *one = float;
                    }
                }
            }
        }
        11 => {
            if let Some(opset) = model.opset_import.first_mut() {
                opset.version = random.below(27) as i64 + 1;
            }
        }
        12 => {
            // A node after another: its operand is the other's result.
            let Some(node) = graph.node.get(at).cloned() else { return };
            let mut next = node.clone();
            next.op_type = random.pick(all).unwrap_or("Relu").into();
            next.attribute.retain(|_| random.below(2) == 0);
            if let (Some(input), Some(result)) = (next.input.first_mut(), node.output.first()) {
                *input = result.clone();
            }
            for output in &mut next.output {
                *output += "'";
            }
            if let Some(first) = next.output.first() {
                graph.output.push(input(first, 1, &[]));
            }
            graph.node.push(next);
        }
        _ => {
            let Some(node) = graph.node.get_mut(at) else { return };
            let name = random.pick(&[
                "axis",
                "axes",
                "k",
                "perm",
                "pads",
                "kernel_shape",
                "strides",
                "dilations",
                "group",
                "mode",
                "keepdims",
                "blocksize",
                "num_outputs",
                "to",
                "auto_pad",
                "ceil_mode",
                "direction",
                "size",
            ]);
            let (name, i) = (name.unwrap_or("axis"), random.integer());
            let ints = (0..random.below(5)).map(|_| random.integer()).collect();
            node.attribute.push(AttributeProto {
                name: name.into(),
                i,
                ints,
                ..Default::default()
            });
        }
    }
}

/// Small models of many operators.
fn seeds() -> Vec<ModelProto> {
    let x = || vec![input("x", 1, &[Dim::N(1), Dim::N(2), Dim::N(6), Dim::N(6)])];
    let of = |nodes: Vec<NodeProto>, stored: Vec<TensorProto>| model(x(), stored, nodes, &["y"]);
    let weight = || floats("w", &[2, 2, 3, 3], &[0.5; 36]);
    let body = graph(
        &["i", "go", "v"],
        vec![node("Add", &["v", "x"], &["w"]), node("Identity", &["go"], &["on"])],
        &["on", "w"],
    );
    let branch = |op: &str| graph(&[], vec![node(op, &["x"], &["b"])], &["b"]);
    vec![
        of(vec![node("Conv", &["x", "w"], &["y"]).with(&[list("pads", &[1; 4])])], vec![weight()]),
        of(
            vec![node("ConvTranspose", &["x", "w"], &["y"]).with(&[list("strides", &[2, 2])])],
            vec![weight()],
        ),
        of(
            vec![node("MaxPool", &["x"], &["y", "places"]).with(&[
                list("kernel_shape", &[2, 2]),
                list("dilations", &[1, 2]),
                int("ceil_mode", 1),
            ])],
            vec![],
        ),
        of(
            vec![node("AveragePool", &["x"], &["y"]).with(&[
                list("kernel_shape", &[3, 3]),
                list("pads", &[1; 4]),
                int("count_include_pad", 1),
            ])],
            vec![],
        ),
        of(
            vec![node("Resize", &["x", "", "s"], &["y"]).with(&[
                text("mode", "cubic"),
                text("coordinate_transformation_mode", "align_corners"),
            ])],
            vec![floats("s", &[4], &[1.0, 1.0, 2.0, 0.5])],
        ),
        of(
            vec![node("Range", &["a", "n", "one"], &["r"]), node("Mul", &["r", "x"], &["y"])],
            vec![scalar("a", 0), scalar("n", 6), scalar("one", 1)],
        ),
        of(
            vec![
                node("Shape", &["x"], &["s"]),
                node("ConstantOfShape", &["s"], &["c"]),
                node("Add", &["c", "x"], &["y"]),
            ],
            vec![],
        ),
        of(
            vec![node("Loop", &["n", "", "x"], &["y"]).with(&[inside("body", body)])],
            vec![scalar("n", 3)],
        ),
        of(
            vec![node("If", &["yes"], &["y"]).with(&[
                inside("then_branch", branch("Relu")),
                inside("else_branch", branch("Neg")),
            ])],
            vec![flag("yes", true)],
        ),
        of(
            vec![node("Pad", &["x", "p"], &["y"]).with(&[text("mode", "reflect")])],
            vec![ints("p", &[0, 0, 1, 2, 0, 0, 2, 1])],
        ),
        of(
            vec![node("Slice", &["x", "b", "e", "a", "t"], &["y"])],
            vec![ints("b", &[0]), ints("e", &[5]), ints("a", &[2]), ints("t", &[2])],
        ),
        of(
            vec![
                node("Split", &["x", "parts"], &["p", "q"]).with(&[int("axis", 2)]),
                node("Concat", &["q", "p"], &["y"]).with(&[int("axis", 2)]),
            ],
            vec![ints("parts", &[2, 4])],
        ),
        of(
            vec![node("Einsum", &["x", "x"], &["y"]).with(&[text("equation", "bcij,bckj->bcik")])],
            vec![],
        ),
        of(vec![node("TopK", &["x", "k"], &["v", "y"])], vec![ints("k", &[2])]),
        of(
            vec![node("HannWindow", &["n"], &["h"]), node("Mul", &["x", "h"], &["y"])],
            vec![scalar("n", 6)],
        ),
        of(
            vec![node("DFT", &["z"], &["y"]).with(&[int("axis", 1)])],
            vec![floats("z", &[1, 4, 2], &[1.0; 8])],
        ),
        of(
            vec![node("LSTM", &["s", "w", "r"], &["y"])],
            vec![
                floats("s", &[2, 1, 3], &[0.5; 6]),
                floats("w", &[1, 8, 3], &[0.5; 24]),
                floats("r", &[1, 8, 2], &[0.5; 16]),
            ],
        ),
        of(
            vec![node("GatherND", &["x", "i"], &["y"]).with(&[int("batch_dims", 1)])],
            vec![TensorProto { dims: vec![1, 2], ..ints("i", &[1, 3]) }],
        ),
        of(
            vec![node("OneHot", &["i", "n", "v"], &["y"])],
            vec![ints("i", &[1, 2]), scalar("n", 4), floats("v", &[2], &[0.0, 1.0])],
        ),
        of(
            vec![node("ReduceMean", &["x", "a"], &["m"]), node("Softmax", &["m"], &["y"])],
            vec![ints("a", &[-1])],
        ),
    ]
}

/// Files that once went wrong.
fn corpus() -> Vec<ModelProto> {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/onnx"))
}

/// The models in a folder, and in the folders in it.
fn read(folder: &Path) -> Vec<ModelProto> {
    let mut files = Vec::new();
    stored(folder, &mut files);
    let read = |file: &PathBuf| ModelProto::decode(&*std::fs::read(file).ok()?).ok();
    files.iter().filter_map(read).collect()
}

fn stored(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    for path in entries {
        match path.is_dir() {
            true => stored(&path, found),
            false if path.extension().is_some_and(|e| e == "onnx") => found.push(path),
            false => {}
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

#[test]
fn mutants_give_a_graph_or_an_error() {
    let mut models = seeds();
    if let Some(folder) = std::env::var_os("FRIT_SEEDS") {
        models.extend(read(Path::new(&folder)));
    }
    let all = crate::import::onnx::operators();
    let first = number("FRIT_MUTANTS_FROM", 0);
    for seed in first..first + number("FRIT_MUTANTS", MUTANTS) {
        let mut random = Random::new(seed);
        let mut mutant = models[random.below(models.len())].clone();
        for _ in 0..1 + random.below(4) {
            mutate(&mut mutant, &all, &mut random);
        }
        behaves(&mutant, &format!("mutant {seed}"));
    }
}

/// Fails unless the model is read or refused. How long that takes is counted by the limits, not timed: machines differ.
fn behaves(model: &ModelProto, name: &str) {
    let run = || import(model, &bind(&[])).map(|imported| imported.graph);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    assert!(outcome.is_ok(), "{name} panics: {model:?}");
    if let Ok(Ok(graph)) = outcome
        && let Err(found) = frit_ir::verify::verify(&graph)
    {
        panic!("{name} breaks the laws of graphs: {found:?}");
    }
}

#[test]
fn what_once_went_wrong_gives_a_graph_or_an_error() {
    let corpus = corpus();
    assert!(corpus.len() > 30, "{}", corpus.len());
    for model in corpus {
        behaves(&model, model.graph.as_ref().map_or("", |g| &g.name));
    }
}
