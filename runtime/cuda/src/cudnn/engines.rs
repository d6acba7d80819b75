//! cuDNN engines for an operation graph, with their settings. Only engines whose accumulation is as precise as the plan
//! requires are accepted, and only deterministic ones unless the operation may add in any order.

use super::descriptor::{self as names, Api, Attribute, Descriptor, Kind, Raw, Result};
use super::operations::Graph;
use crate::error::CudaError;
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind};
use serde::{Deserialize, Serialize};
use std::ptr::null_mut;
use std::rc::Rc;

/// Maximum number of candidate engines.
const CANDIDATES: usize = 8;
/// Maximum settings and notes of an engine, and results of a heuristic.
const MOST: usize = 64;
const MOST_ANSWERS: usize = 256;

/// `cudnnBackendHeurMode_t`: by predicted time, and fallback engines.
const HEURISTICS: [i32; 2] = [3, 2];

/// `cudnnBackendNumericalNote_t`.
const TENSOR_CORE: i32 = 0;
const DOWN_CONVERT_INPUTS: i32 = 1;
const REDUCED_PRECISION_REDUCTION: i32 = 2;
const FFT: i32 = 3;
const NONDETERMINISTIC: i32 = 4;
const WINOGRAD: std::ops::RangeInclusive<i32> = 5..=8;

/// `cudnnBackendBehaviorNote_t`.
const RUNTIME_COMPILATION: i32 = 0;

/// `cudnnBackendKnobType_t`: number of slices into which sums are split.
const SPLITS: [i32; 2] = [17, 39];

/// An engine with its settings, valid for one operation, library version and GPU model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// Its number among those of the operation.
    pub engine: i64,
    /// Its settings: kind and value.
    pub knobs: Vec<(i32, i64)>,
}

/// The device for which engines are sought.
pub(super) enum Target {
    /// The device of this handle.
    Handle(Raw),
    /// A described device, which need not exist.
    Described(Descriptor),
}

impl Target {
    /// The handle; null if there is none.
    pub(super) fn handle(&self) -> Raw {
        match self {
            Target::Handle(handle) => *handle,
            Target::Described(_) => null_mut(),
        }
    }

    /// Sets a descriptor's device, where the device is described.
    fn tell(&self, descriptor: &mut Descriptor, attribute: &Attribute<Raw>) -> Result {
        match self {
            Target::Handle(_) => Ok(()),
            Target::Described(device) => descriptor.refer(attribute, &[device]),
        }
    }
}

/// Engines that compute a graph within `workspace_bytes`, in order of expected speed.
///
/// # Errors
/// If the library fails; not if it has no engine.
pub(super) fn find(
    api: &Rc<Api>,
    target: &Target,
    (graph, operation): (&Graph, &Operation),
    workspace_bytes: usize,
) -> Result<Vec<Engine>> {
    let (mut found, mut compiled) = (Vec::new(), 0);
    for mode in HEURISTICS {
        let mut heuristics = Descriptor::new(api, Kind::Heuristics)?;
        heuristics.refer(&names::HEURISTICS_GRAPH, &[&graph.graph])?;
        heuristics.set(&names::HEURISTICS_MODE, &[mode])?;
        target.tell(&mut heuristics, &names::HEURISTICS_DEVICE)?;
        // A heuristic without results may fail.
        let Ok(heuristics) = heuristics.finalize() else { continue };
        let kind = Kind::EngineConfiguration;
        let answers = heuristics.get_all(&names::HEURISTICS_RESULTS, kind, MOST_ANSWERS);
        for answer in answers.unwrap_or_default() {
            let Some((engine, notes)) = read(&answer)? else { continue };
            let fits = notes.workspace_bytes.is_none_or(|bytes| bytes <= workspace_bytes);
            if !fits
                || !notes.allow(operation)
                || !notes.is_ordered(&engine, operation)
                || found.contains(&engine)
            {
                continue;
            }
            if notes.is_compiled {
                compiled += 1;
                if compiled > most_compiled(operation) {
                    continue;
                }
            }
            found.push(engine);
            if found.len() == CANDIDATES {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// Maximum number of engines to compile, which takes seconds each. Models have batch normalizations of many sizes,
/// whose engines differ little.
fn most_compiled(operation: &Operation) -> usize {
    match operation.kind {
        OperationKind::BatchNorm { .. } | OperationKind::BatchNormGrad => 1,
        _ => 3,
    }
}

/// Properties of an engine.
struct Notes {
    numerical: Vec<i32>,
    is_compiled: bool,
    /// Not reported by old versions of the library.
    workspace_bytes: Option<usize>,
}

impl Notes {
    /// Whether the engine may compute the operation.
    fn allow(&self, operation: &Operation) -> bool {
        // Tensor cores round f32 operands to 10 bits; transforms round between their stages.
        let wide = operation.tensors.iter().all(|t| t.dtype == DType::F32);
        !self.numerical.iter().any(|note| match *note {
            NONDETERMINISTIC => !operation.any_order,
            DOWN_CONVERT_INPUTS | REDUCED_PRECISION_REDUCTION | FFT => true,
            TENSOR_CORE => wide,
            note => WINOGRAD.contains(&note),
        })
    }

    /// Whether slices of sums are added in a fixed order, unless any will do. Engines that are compiled at run time have no note of it:
    /// they add slices in order if they have memory for each, and as they complete otherwise.
    fn is_ordered(&self, engine: &Engine, operation: &Operation) -> bool {
        let split = engine.knobs.iter().filter(|(kind, _)| SPLITS.contains(kind));
        let slices = split.map(|(_, value)| usize::try_from(*value).unwrap_or(0)).max();
        let result = &operation.tensors[operation.results()[0]];
        let sums_bytes = result.sizes.iter().product::<usize>() * DType::F32.size();
        match slices {
            Some(n) if self.is_compiled && n > 1 && !operation.any_order => {
                self.workspace_bytes.is_some_and(|bytes| bytes >= n * sums_bytes)
            }
            _ => true,
        }
    }
}

/// Reads a result of a heuristic; `None` if it names no engine.
fn read(answer: &Descriptor) -> Result<Option<(Engine, Notes)>> {
    let engine = answer.get_all(&names::CONFIGURATION_ENGINE, Kind::Engine, 1)?;
    let Some(engine) = engine.first() else { return Ok(None) };
    let Some(&index) = engine.get(&names::ENGINE_INDEX, 1)?.first() else { return Ok(None) };
    let mut knobs = Vec::new();
    for knob in answer.get_all(&names::CONFIGURATION_KNOBS, Kind::KnobChoice, MOST)? {
        let kind = knob.get(&names::KNOB_TYPE, 1)?;
        let value = knob.get(&names::KNOB_VALUE, 1)?;
        knobs.extend(kind.into_iter().zip(value));
    }
    let behavior = engine.get(&names::ENGINE_BEHAVIOR_NOTES, MOST)?;
    let workspace = answer.get(&names::CONFIGURATION_WORKSPACE, 1).unwrap_or_default();
    let notes = Notes {
        numerical: engine.get(&names::ENGINE_NUMERICAL_NOTES, MOST)?,
        is_compiled: behavior.contains(&RUNTIME_COMPILATION),
        workspace_bytes: workspace.first().map(|bytes| *bytes as usize),
    };
    Ok(Some((Engine { engine: index, knobs }, notes)))
}

/// An execution plan and the descriptors that it owns.
pub(super) struct Planned {
    plan: Descriptor,
    _parts: Vec<Descriptor>,
    graph: Graph,
    n_tensors: usize,
    /// Workspace that it needs, in bytes.
    pub(super) workspace_bytes: usize,
}

/// Prepares an engine, and waits until it is compiled.
///
/// # Errors
/// If the library refuses it, or it needs more workspace.
pub(super) fn plan(
    api: &Rc<Api>,
    target: &Target,
    (graph, operation): (Graph, &Operation),
    choice: &Engine,
    workspace_bytes: usize,
) -> Result<Planned> {
    let mut engine = Descriptor::new(api, Kind::Engine)?;
    engine.refer(&names::ENGINE_GRAPH, &[&graph.graph])?;
    engine.set(&names::ENGINE_INDEX, &[choice.engine])?;
    target.tell(&mut engine, &names::ENGINE_DEVICE)?;
    let engine = engine.finalize()?;
    let mut knobs = Vec::new();
    for (kind, value) in &choice.knobs {
        let mut knob = Descriptor::new(api, Kind::KnobChoice)?;
        knob.set(&names::KNOB_TYPE, &[*kind])?;
        knob.set(&names::KNOB_VALUE, &[*value])?;
        knobs.push(knob.finalize()?);
    }
    let mut configuration = Descriptor::new(api, Kind::EngineConfiguration)?;
    configuration.refer(&names::CONFIGURATION_ENGINE, &[&engine])?;
    if !knobs.is_empty() {
        let knobs: Vec<&Descriptor> = knobs.iter().collect();
        configuration.refer(&names::CONFIGURATION_KNOBS, &knobs)?;
    }
    let configuration = configuration.finalize()?;
    let mut plan = Descriptor::new(api, Kind::ExecutionPlan)?;
    match target {
        Target::Handle(handle) => plan.set(&names::PLAN_HANDLE, &[*handle])?,
        Target::Described(_) => target.tell(&mut plan, &names::PLAN_DEVICE)?,
    }
    plan.refer(&names::PLAN_CONFIGURATION, &[&configuration])?;
    let plan = plan.finalize()?;
    let needed = plan.get(&names::PLAN_WORKSPACE, 1)?.first().map_or(0, |bytes| *bytes as usize);
    if needed > workspace_bytes {
        let reason = format!("the engine needs {needed} bytes of workspace, not {workspace_bytes}");
        return Err(CudaError::Call { call: "cuDNN", reason });
    }
    let parts = knobs.into_iter().chain([configuration, engine]).collect();
    let n_tensors = operation.tensors.len();
    Ok(Planned { plan, _parts: parts, graph, n_tensors, workspace_bytes: needed })
}

impl Planned {
    /// Enqueues it on the handle's stream.
    ///
    /// # Safety
    /// The addresses must be those of the operation's tensors, and valid when it runs.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) unsafe fn execute(
        &self,
        api: &Rc<Api>,
        handle: Raw,
        at: &[u64],
        workspace: u64,
    ) -> Result {
        let mut ids: Vec<i64> = (1..=self.n_tensors as i64).collect();
        let mut pointers: Vec<Raw> = at.iter().map(|address| *address as Raw).collect();
        for (id, value) in &self.graph.values {
            ids.push(*id);
            pointers.push((&raw const *value).cast_mut().cast());
        }
        let mut pack = Descriptor::new(api, Kind::VariantPack)?;
        pack.set(&names::PACK_IDS, &ids)?;
        pack.set(&names::PACK_POINTERS, &pointers)?;
        pack.set(&names::PACK_WORKSPACE, &[workspace as Raw])?;
        let pack = pack.finalize()?;
        // SAFETY: by the contract of this function.
        unsafe { self.plan.execute(handle, &pack) }
    }
}
