//! One conformance test: import, evaluate, compare.

use super::proto;
use crate::certificate::plans;
use crate::stand_ins::Gpu;
use frit::certificate::{Certificate, certify};
use frit::compilation::{Compiled, Request, compile};
use frit::config::Config;
use frit::import::onnx::messages::{
    DimensionProto, ModelProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use frit::import::{ImportOptions, Imported, onnx};
use frit::plan_dir::{Stored, write};
use frit_ir::interpret::{self, Options};
use frit_ir::plan::{Kernel, KernelKind, ParamSpec, Plan};
use frit_ir::{DType, Tensor, TensorType, ValueId};
use frit_runtime::eval::evaluate;
use frit_runtime::run::{RunOptions, run};
use frit_runtime::safetensors_dtype;
use prost::Message;
use prost::bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Float inputs of so many elements at most may be settings of an operator, as the scales of Resize.
const MAX_SETTINGS: usize = 16;

/// The inputs of one run and the outputs they must give, in the order of the graph's.
struct Run {
    inputs: Vec<TensorProto>,
    outputs: Vec<Tensor>,
}

/// A test.
pub(super) struct Case {
    folder: PathBuf,
    model: ModelProto,
    runs: Vec<Run>,
}

/// Which inputs are known at import, because operators require them to be.
#[derive(Clone, Copy, PartialEq)]
enum Known {
    Nothing,
    Integers,
    Settings,
    Everything,
}

impl Known {
    /// Whether input `i` of this type is known.
    fn covers(self, i: usize, tensor: &TensorProto) -> bool {
        let float = matches!(tensor.data_type, 1 | 10 | 11 | 16);
        let numel: i64 = tensor.dims.iter().product();
        match self {
            Known::Nothing => false,
            Known::Integers => !float,
            Known::Settings => !float || (i > 0 && numel <= MAX_SETTINGS as i64),
            Known::Everything => true,
        }
    }
}

impl Case {
    /// Reads a test.
    pub(super) fn read(folder: &Path) -> Result<Case, String> {
        let bytes = std::fs::read(folder.join("model.onnx")).map_err(|e| e.to_string())?;
        let model = ModelProto::decode(Bytes::from(bytes)).map_err(|e| e.to_string())?;
        let mut runs = Vec::new();
        for number in 0.. {
            let data = folder.join(format!("test_data_set_{number}"));
            if !data.exists() {
                break;
            }
            let all = |kind: &str| {
                let paths = (0..).map(|i| data.join(format!("{kind}_{i}.pb")));
                paths
                    .take_while(|p| p.exists())
                    .map(|p| proto::read(&p))
                    .collect::<Result<Vec<_>, _>>()
            };
            let outputs = all("output")?.iter().map(proto::tensor).collect::<Result<_, _>>()?;
            runs.push(Run { inputs: all("input")?, outputs });
        }
        if runs.is_empty() {
            return Err("there is no data".into());
        }
        Ok(Case { folder: folder.into(), model, runs })
    }

    /// The operator of the default domain that the model is made of, if it is only one.
    pub(super) fn operator(&self) -> Option<String> {
        let nodes = &self.model.graph.as_ref()?.node;
        let names: BTreeSet<&str> = nodes.iter().map(|n| n.op_type.as_str()).collect();
        let own = nodes.iter().all(|n| n.domain.is_empty() || n.domain == "ai.onnx");
        let function = self.model.functions.iter().any(|f| names.contains(f.name.as_str()));
        let single = own && !function && names.len() == 1;
        single.then(|| names.into_iter().next().map(str::to_string)).flatten()
    }

    /// Imports and evaluates the model for every run and compares.
    /// `operations` receives the names of those that the model became.
    pub(super) fn check(&self, operations: &mut BTreeSet<String>) -> Result<(), String> {
        for run in &self.runs {
            let (imported, feeds) = self.import(run)?;
            let inner = imported.graph.nodes().filter(|(_, n)| !n.op.is_leaf());
            operations.extend(inner.map(|(_, n)| n.op.name().to_string()));
            let found = interpret::run(&imported.graph, &feeds, Options::default())
                .map_err(|e| e.to_string())?;
            if found.len() != run.outputs.len() {
                return Err(format!("{} outputs, not {}", found.len(), run.outputs.len()));
            }
            for ((name, found), expected) in found.iter().zip(&run.outputs) {
                compare(name, found, expected)?;
            }
        }
        Ok(())
    }

    /// Compiles the model for its first run, evaluates the plan, and compares.
    pub(super) fn compiled(&self) -> Result<(), String> {
        let run = &self.runs[0];
        self.first_that_compiles(|model, feeds, options| {
            let (dir, compiled) = compiled(&model, options, &["loss.kind=none".into()])?;
            write(&dir.path().join("plan"), &compiled, Stored::Copy).map_err(|e| e.to_string())?;
            evaluated(&dir, feeds, &run.outputs, |plan, inputs, outputs| {
                let options = frit_runtime::eval::Options {
                    plan,
                    inputs: Some(inputs),
                    dump_outputs: Some(outputs),
                    threads: Some(1),
                    ..Default::default()
                };
                evaluate(&options).map(drop).map_err(|e| e.to_string())
            })
        })
    }

    /// The same for a GPU, evaluated on one in software.
    pub(super) fn compiled_for_cuda(&self) -> Result<(), String> {
        let run = &self.runs[0];
        self.first_that_compiles(|model, feeds, options| {
            let settings = ["loss.kind=none".into(), "target.device=cuda".into()];
            let (dir, compiled) = compiled(&model, options, &settings)?;
            write(&dir.path().join("plan"), &compiled, Stored::Copy).map_err(|e| e.to_string())?;
            evaluated(&dir, feeds, &run.outputs, |plan, inputs, outputs| {
                let [plan, inputs, outputs] =
                    [plan, inputs, outputs].map(|path| path.display().to_string());
                on_gpu(&["eval", &plan, "--inputs", &inputs, "--dump-outputs", &outputs])
            })
        })
    }

    /// Compiles the model as a step that trains its float inputs, and compares the gradients of both devices. Names
    /// what the CPU leaves to the interpreter.
    pub(super) fn trained(&self) -> Result<(), String> {
        let on = |device: &str| format!("target.device={device}");
        self.first_that_compiles(|model, feeds, options| {
            let Some((model, loss)) = self.as_training(model) else { return Ok(()) };
            let mut plans = Vec::new();
            for device in ["cpu", "cuda"] {
                let settings = [&loss[..], &[on(device)]].concat();
                let (dir, compiled) = match compiled(&model, options, &settings) {
                    Ok(compiled) => compiled,
                    Err(why) if why.contains(UNTRAINED) => return Ok(()),
                    Err(why) => return Err(format!("to train on {device}: {why}")),
                };
                let is_finite = |p: &ParamSpec| {
                    let value = compiled.weights.get(&p.name);
                    let value = value.map(|w| Tensor::from_bytes(p.ty.clone(), w.bytes()));
                    value.is_none_or(|t| t.is_ok_and(|t| t.to_f64s().iter().all(|x| x.is_finite())))
                };
                // A run that learns nothing of what is not a number fails, as it should.
                if !compiled.plan.params.iter().all(is_finite) {
                    return Ok(());
                }
                write(&dir.path().join("plan"), &compiled, Stored::Copy)
                    .map_err(|e| e.to_string())?;
                let plan = compiled.plan;
                let interpreted = plan.kernels.iter().find(|k| {
                    let several = |v: &ValueId| k.body.ty(*v).shape.numel() > 1;
                    k.kind() == KernelKind::Interpreted
                        && k.body.nodes().any(|(_, n)| n.outputs.iter().any(several))
                });
                if let Some(kernel) = interpreted {
                    return Err(format!("{} is interpreted", kernel.name));
                }
                plans.push((dir, plan));
            }
            same_gradients(&plans, feeds)
        })
    }

    /// The model with its float inputs as parameters, and the settings of a loss of its first float output; none if there is no
    /// such input or output.
    fn as_training(&self, mut model: ModelProto) -> Option<(ModelProto, [String; 2])> {
        let of_floats = |v: &&ValueInfoProto| {
            let ty = v.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            // f32, f16 and bf16
            ty.is_some_and(|t| matches!(t.elem_type, 1 | 10 | 16))
        };
        let graph = model.graph.as_mut()?;
        let result = graph.output.iter().find(of_floats)?;
        let loss = ["loss.kind=mse".into(), format!("loss.logits={:?}", result.name)];
        let declared = self.model.graph.as_ref().map_or(&[][..], |g| &g.input);
        let (mut kept, mut trained) = (Vec::new(), 0);
        for info in std::mem::take(&mut graph.input) {
            let i = declared.iter().position(|v| v.name == info.name);
            match i.and_then(|i| self.runs[0].inputs.get(i)) {
                Some(value) if of_floats(&&info) && !value.dims.contains(&0) => {
                    trained += 1;
                    let name = info.name;
                    graph.initializer.push(TensorProto { name, ..value.clone() });
                }
                _ => kept.push(info),
            }
        }
        graph.input = kept;
        (trained > 0).then_some((model, loss))
    }

    /// The certificate of the model, compiled with these settings; of its training if these ask for it. None if there is nothing to train.
    pub(super) fn certified(
        &self,
        trains: bool,
        settings: &[String],
    ) -> Result<Option<Certificate>, String> {
        let found = RefCell::new(None);
        self.first_that_compiles(|model, _, options| {
            let (model, loss) = match trains {
                true => match self.as_training(model) {
                    Some((model, loss)) => (model, loss.to_vec()),
                    None => return Ok(()),
                },
                false => (model, vec!["loss.kind=none".into()]),
            };
            let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
            let (request, config) =
                request(&dir, &model, options, &[&loss[..], settings].concat())?;
            let request = Request { without_code: true, evaluation: trains, ..request };
            let compiled = match compile(&request, &config, &mut ()) {
                Ok(compiled) => compiled.expect("no pass was asked to stop"),
                Err(why) if why.to_string().contains(UNTRAINED) => return Ok(()),
                Err(why) => return Err(why.to_string()),
            };
            let certificate = certify(&request, &config, &compiled.pass_trace, plans(&compiled));
            found.replace(Some(certificate.map_err(|e| e.to_string())?));
            Ok(())
        })?;
        Ok(found.into_inner())
    }

    /// Does something with the model in which as few of the first run's inputs as possible are known.
    fn first_that_compiles(
        &self,
        of: impl Fn(ModelProto, HashMap<String, Tensor>, &ImportOptions) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut error = String::new();
        for known in [Known::Nothing, Known::Integers, Known::Settings, Known::Everything] {
            let (model, feeds, options) = self.with_known(&self.runs[0], known)?;
            match of(model, feeds, &options) {
                Ok(()) => return Ok(()),
                Err(why) => error = why,
            }
            // A file of examples cannot hold inputs whose first axis is no batch; constants may have any.
            if !error.contains("depends on data") && !error.contains("examples") {
                break;
            }
        }
        Err(error)
    }

    /// The imported model and what feeds its leaves. Inputs become known only where they must.
    fn import(&self, run: &Run) -> Result<(Imported, HashMap<String, Tensor>), String> {
        let mut error = String::new();
        for known in [Known::Nothing, Known::Integers, Known::Settings, Known::Everything] {
            let (model, feeds, options) = self.with_known(run, known)?;
            let bytes = Bytes::from(model.encode_to_vec());
            match onnx::import(bytes, "case", &self.folder.join("model.onnx"), &options) {
                Ok(imported) => {
                    let mut feeds = feeds;
                    for (_, param) in imported.graph.params() {
                        if let Some(weight) = imported.weights.get(&param.name) {
                            let value = Tensor::from_bytes(param.ty.clone(), weight.bytes());
                            let value = value.map_err(|e| e.to_string())?;
                            feeds.insert(param.name.clone(), value);
                        }
                    }
                    return Ok((imported, feeds));
                }
                Err(report) => error = report.to_string(),
            }
            if !error.contains("depends on data") {
                break;
            }
        }
        Err(error)
    }

    /// The model with the run's shapes, and those of its inputs that are known as initializers.
    fn with_known(
        &self,
        run: &Run,
        known: Known,
    ) -> Result<(ModelProto, HashMap<String, Tensor>, ImportOptions), String> {
        let mut model = self.model.clone();
        let mut feeds = HashMap::new();
        let mut options = ImportOptions::default();
        let graph = model.graph.as_mut().ok_or("no graph")?;
        let stored: Vec<String> = graph.initializer.iter().map(|t| t.name.clone()).collect();
        let mut fed = run.inputs.iter();
        let mut kept = Vec::new();
        for (i, mut info) in std::mem::take(&mut graph.input).into_iter().enumerate() {
            // Older files list initializers among the inputs; they come without data.
            let given = !stored.contains(&info.name) || run.inputs.len() > stored.len();
            let value = if given { fed.next() } else { None };
            let Some(value) = value else {
                kept.push(info);
                continue;
            };
            if info.r#type.as_ref().is_none_or(|t| t.tensor_type.is_none()) {
                return Err(format!("input `{}` is no tensor", info.name));
            }
            if known.covers(i, value) {
                options.ignored.push(info.name.clone());
                graph.initializer.push(TensorProto { name: info.name, ..value.clone() });
                continue;
            }
            let dim = |n: &i64| DimensionProto { dim_value: Some(*n), dim_param: None };
            let shape = TensorShapeProto { dim: value.dims.iter().map(dim).collect() };
            let ty = TensorTypeProto { elem_type: value.data_type, shape: Some(shape) };
            info.r#type = Some(TypeProto { tensor_type: Some(ty) });
            feeds.insert(info.name.clone(), proto::tensor(value)?);
            kept.push(info);
        }
        graph.input = kept;
        Ok((model, feeds, options))
    }
}

/// What is said of a model that only rearranges or compares.
const UNTRAINED: &str = "no parameter is trained";

/// The model compiled in fp32 with these settings, and a folder to keep it in.
fn compiled(
    model: &ModelProto,
    options: &ImportOptions,
    settings: &[String],
) -> Result<(tempfile::TempDir, Compiled), String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let settings = [settings, &["precision.compute=fp32".into()]].concat();
    let (request, config) = request(&dir, model, options, &settings)?;
    let compiled = compile(&request, &config, &mut ()).map_err(|e| e.to_string())?;
    Ok((dir, compiled.expect("no pass was asked to stop")))
}

/// The request to compile a model, which is kept in this folder, and the configuration of these settings.
fn request(
    dir: &tempfile::TempDir,
    model: &ModelProto,
    options: &ImportOptions,
    settings: &[String],
) -> Result<(Request, Config), String> {
    let file = dir.path().join("model.onnx");
    std::fs::write(&file, model.encode_to_vec()).map_err(|e| e.to_string())?;
    let ignored = format!("params.ignored={:?}", options.ignored);
    let config = Config::load(None, &[settings, &[ignored]].concat()).map_err(|e| e.to_string())?;
    Ok((Request { model: file, ..Request::default() }, config))
}

/// Evaluates a plan on these inputs and compares its outputs, in order. `evaluate` is given the plan, the file of
/// the inputs, and that of the outputs.
fn evaluated(
    plan: &tempfile::TempDir,
    feeds: HashMap<String, Tensor>,
    expected: &[Tensor],
    evaluate: impl FnOnce(PathBuf, PathBuf, PathBuf) -> Result<(), String>,
) -> Result<(), String> {
    let (inputs, outputs) =
        (plan.path().join("inputs.safetensors"), plan.path().join("outputs.safetensors"));
    save(&inputs, feeds)?;
    evaluate(plan.path().join("plan"), inputs, outputs.clone())?;
    let file = std::fs::read(plan.path().join("plan/plan.json")).map_err(|e| e.to_string())?;
    let json: serde_json::Value = serde_json::from_slice(&file).map_err(|e| e.to_string())?;
    let bytes = std::fs::read(outputs).map_err(|e| e.to_string())?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| e.to_string())?;
    let specs = json["eval"]["outputs"].as_array().map_or(&[][..], Vec::as_slice);
    if specs.len() != expected.len() {
        return Err(format!("{} outputs, not {}", specs.len(), expected.len()));
    }
    for (spec, expected) in specs.iter().zip(expected) {
        let name = spec["name"].as_str().unwrap_or_default();
        let found = tensors.tensor(name).map_err(|e| e.to_string())?;
        if found.dtype() != safetensors_dtype(expected.dtype()) {
            return Err(format!("{name} is {:?}, not {}", found.dtype(), expected.ty));
        }
        let ty = TensorType::new(expected.dtype(), found.shape());
        let found = Tensor::from_bytes(ty, found.data()).map_err(|e| e.to_string())?;
        compare(name, &found, expected)?;
    }
    Ok(())
}

/// As ONNX's own runner compares: relative 1e-3, absolute 1e-7 (of the largest element, if that is above
/// one, for what should cancel); bf16 to its last bit but one.
fn compare(name: &str, found: &Tensor, expected: &Tensor) -> Result<(), String> {
    if found.ty != expected.ty {
        return Err(format!("{name} is {}, not {}", found.ty, expected.ty));
    }
    let relative = if expected.dtype() == DType::BF16 { 1.6e-2 } else { 1e-3 };
    let (a, b) = (found.to_f64s(), expected.to_f64s());
    let largest = b.iter().filter(|x| x.is_finite()).fold(1.0, |most: f64, x| most.max(x.abs()));
    let absolute = 1e-7 * largest;
    let close = |(a, b): (&f64, &f64)| {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= absolute + relative * b.abs()
    };
    let wrong = a.iter().zip(&b).filter(|pair| !close(*pair)).count();
    if wrong == 0 {
        return Ok(());
    }
    let ty: &TensorType = &expected.ty;
    let (a, b) = a.iter().zip(&b).find(|pair| !close(*pair)).expect("one is wrong");
    Err(format!("{name} {ty}: {wrong} elements differ, such as {a} for {b}"))
}

/// Gradients may differ by this part of the largest of a tensor: sums are taken in another order, and 16-bit values
/// may be neighbors.
const GRADIENT_TOLERANCES: [f64; 2] = [1e-4, 4e-3];

/// One step of the plan for the CPU and of that for CUDA, on a GPU in software; labels are made up.
fn same_gradients(
    plans: &[(tempfile::TempDir, Plan)],
    feeds: HashMap<String, Tensor>,
) -> Result<(), String> {
    let [(cpu, plan), (cuda, _)] = plans else { return Err("two plans".into()) };
    let fed = plan.inputs.iter().map(|input| {
        let numbers = |i: usize| (i * 37 % 19) as f64 / 9.0 - 1.0;
        let made_up = || {
            let n = input.ty.shape.numel();
            Tensor::floats(input.ty.dtype, input.ty.shape.clone(), (0..n).map(numbers).collect())
        };
        (input.name.clone(), feeds.get(&input.name).cloned().unwrap_or_else(made_up))
    });
    let data = cpu.path().join("data.safetensors");
    save(&data, fed.collect())?;
    let [expected, found] = [cpu, cuda].map(|dir| dir.path().join("gradients.safetensors"));
    let options = RunOptions {
        steps: 1,
        data: data.clone().into(),
        dump_grads: Some(expected.clone()),
        threads: Some(1),
        ..RunOptions::default()
    };
    run(&cpu.path().join("plan"), &options).map_err(|e| e.to_string())?;
    let [path, data, gradients] =
        [&cuda.path().join("plan"), &data, &found].map(|path| path.display().to_string());
    on_gpu(&["run", &path, "--data", &data, "--steps", "1", "--dump-grads", &gradients])?;
    let read = |path: &Path| -> Result<BTreeMap<String, Vec<f64>>, String> {
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        let all = SafeTensors::deserialize(&bytes).map_err(|e| e.to_string())?;
        let numbers = |(name, view): (String, TensorView<'_>)| {
            // Whatever trains has a gradient in f32.
            let ty = TensorType::new(DType::F32, view.shape());
            let values = Tensor::from_bytes(ty, view.data()).map_err(|e| e.to_string())?;
            Ok((name, values.to_f64s()))
        };
        all.tensors().into_iter().map(numbers).collect()
    };
    let (expected, found) = (read(&expected)?, read(&found)?);
    if !expected.keys().eq(found.keys()) {
        return Err("the devices have gradients of other tensors".into());
    }
    let values =
        |k: &Kernel| k.body.nodes().flat_map(|(_, n)| n.outputs.clone()).collect::<Vec<_>>();
    let is_narrow = plan
        .kernels
        .iter()
        .any(|k| values(k).iter().any(|v| k.body.ty(*v).dtype.is_low_precision()));
    let tolerance = GRADIENT_TOLERANCES[usize::from(is_narrow)];
    for (name, expected) in &expected {
        let most = expected.iter().fold(1e-5_f64, |most, x| most.max(x.abs()));
        let far = |(a, b): (&f64, &f64)| match a == b || (a.is_nan() && b.is_nan()) {
            true => 0.0,
            false if (a - b).is_nan() => f64::INFINITY,
            false => (a - b).abs() / most,
        };
        let far = expected.iter().zip(&found[name]).map(far).fold(0.0, f64::max);
        if far > tolerance {
            return Err(format!("the gradient of {name} on a GPU is off by {far:e}"));
        }
    }
    Ok(())
}

/// Runs `frit` with these arguments on a GPU in software.
fn on_gpu(arguments: &[&str]) -> Result<(), String> {
    let ended = Gpu::new().run(arguments);
    let broken = ended.log.keys().find(|what| what.starts_with("violation"));
    match (ended.code, broken) {
        (Some(0), None) => Ok(()),
        (Some(0), Some(broken)) => Err(broken.clone()),
        _ => Err(ended.said.replace('\n', " ")),
    }
}

/// Writes tensors by name.
fn save(path: &Path, tensors: HashMap<String, Tensor>) -> Result<(), String> {
    let bytes: BTreeMap<String, (Tensor, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let bytes = tensor.to_bytes();
            (name, (tensor, bytes))
        })
        .collect();
    let views = bytes.iter().map(|(name, (t, bytes))| {
        let dtype = safetensors_dtype(t.dtype());
        (name, TensorView::new(dtype, t.shape().0.clone(), bytes).expect("its bytes"))
    });
    safetensors::serialize_to_file(views, None, path).map_err(|e| e.to_string())
}
