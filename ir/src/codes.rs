//! The codes of diagnostics, each with its meaning and a remedy: the one list, from which `docs/errors.md` is written.

use std::fmt::{self, Write};

/// Defines [`Code`] by rows `Name = "id": "meaning", "remedy", "test";`.
macro_rules! codes {
    ($($name:ident = $id:literal: $meaning:literal, $remedy:literal, $test:literal;)*) => {
        /// What a diagnostic is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code {
            $(#[doc = $meaning] $name,)*
        }

        impl Code {
            /// All codes, in order.
            pub const ALL: &[Code] = &[$(Code::$name),*];

            /// What is shown, and does not change from one version to another: `E010`.
            pub const fn id(self) -> &'static str {
                match self { $(Code::$name => $id),* }
            }

            /// The name in source code: `ModelUnreadable`.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$name => stringify!($name)),* }
            }

            /// What is wrong; for the codes of invariants, what must hold.
            pub const fn meaning(self) -> &'static str {
                match self { $(Code::$name => $meaning),* }
            }

            /// What to do; empty for mistakes of Frit.
            pub const fn remedy(self) -> &'static str {
                match self { $(Code::$name => $remedy),* }
            }

            /// The test that raises it.
            pub const fn test(self) -> &'static str {
                match self { $(Code::$name => $test),* }
            }
        }
    };
}

#[rustfmt::skip]
codes! {
    // Errors.
    ModelUnreadable = "E010": "the model file cannot be read", "give the path of an .onnx or .json file", "models_and_command_lines";
    NotAnOnnxModel = "E011": "the file is not a complete ONNX model: it is truncated, of another format, or has no graph or output", "export the model again", "models_and_command_lines";
    GraphCycle = "E012": "nodes of the model need each other's results", "export the model again; the notes list the nodes", "broken_graphs_are_named";
    InitializerUnreadable = "E013": "the elements of an initializer, inside the file or in its external data, cannot be read", "keep external data files beside the model, under their own names", "external_data_is_read_in_place_or_missed_by_name";
    OperandMismatch = "E014": "a node cannot take its operands: their number, shapes, dtypes or attributes do not fit the operator", "the notes list the operands; correct the model, or bind dimensions so that they fit", "misfits_show_operands";
    ValueUndefined = "E015": "a node or an output names a value that nothing defines", "the file is damaged or was edited; export the model again", "broken_graphs_are_named";
    ValueDefinedTwice = "E016": "two nodes, inputs or initializers define one value", "the file is damaged or was edited; export the model again", "broken_graphs_are_named";
    ImportLimit = "E017": "importing would make more nodes, elements, operations or bytes, or go deeper, than the limits of `[import]` allow", "raise the limit that the message names, if the model is meant to be so large", "what_is_made_is_counted_and_the_key_is_named";
    ReservedName = "E018": "an input or output has a name that begins with `frit.`", "rename it", "reserved_names_are_refused_and_all_others_are_free";
    OutputNamedTwice = "E019": "two outputs of the model have one name", "leave one out, or rename it", "two_outputs_of_one_name_are_refused_by_name";
    DimensionUnknown = "E020": "a dimension of an input has no size, or the size 0", "bind it with `--bind NAME=N`, or export the model with it fixed", "dimensions_must_be_bound_and_known";
    BindUnknown = "E021": "`--bind` names a dimension that the model does not have", "the message lists the dimensions of the model", "dimensions_must_be_bound_and_known";
    OperatorUnsupported = "E031": "the model has operators that cannot be imported", "`frit compile --list-ops` lists those that can", "everything_unsupported_is_reported_at_once";
    AttributeUnsupported = "E032": "an operator has an attribute, a value of one, or an output type that cannot be imported", "export the model without it", "everything_unsupported_is_reported_at_once";
    OpsetUnsupported = "E033": "the model does not say its ONNX opset, or is in one that cannot be imported", "export it with `opset_version=18`, or convert it with `onnx.version_converter`", "opsets_and_foreign_files_are_refused";
    DependsOnData = "E034": "a shape, an axis or a condition depends on values that are known only when the model runs", "bind all dimensions, or export the model with it constant", "a_condition_that_depends_on_data_is_named";
    NoBatchNorm = "E036": "`model.batch_norm` is set, and the model has no BatchNormalization", "export the module in training mode, without constant folding", "models_and_command_lines";
    NotAJsonModel = "E040": "the text is no JSON, or no model in the JSON format", "docs/json-model.md describes the format; the message has line and column", "models_and_command_lines";
    JsonModelInvalid = "E041": "a JSON model says something that has no meaning: an unknown version, name, operation or dimension", "correct the place that the message names", "models_and_command_lines";
    ConfigUnreadable = "E050": "the configuration file cannot be read, or is no TOML", "give the path of a train.toml", "configurations";
    ConfigValue = "E051": "a key of the configuration has a value of another type, or outside its range", "`frit compile --help-config` lists keys, types and ranges", "configurations";
    ConfigKeyUnknown = "E052": "the configuration has no such key", "`frit compile --help-config` lists the keys", "configurations";
    ConfigContradiction = "E053": "values of the configuration, each allowed, do not go together, or name what the model does not have", "the help of the message says which to change", "configurations";
    ArchUnknown = "E055": "`target.arch` is no processor that plans are compiled for, or a value is not implemented for it", "the message lists those that are", "configurations";
    ClusterInvalid = "E056": "the description of a cluster is no TOML, or has unknown or impossible values", "start from a built-in cluster: `base = \"h100\"`", "plans_and_what_is_done_with_them";
    NeedsAnotherSetting = "E057": "a setting asks for something that the target or another setting does not give", "the help of the message says which to change", "configurations";
    BudgetTooSmall = "E058": "no plan needs as little memory as `memory.budget` allows", "the message says the smallest budget that would do", "configurations";
    EmulationOfRecompute = "E059": "an emulation of another system starts from a plan that recomputes", "compile it with `memory.recompute = \"none\"` and give `--checkpointing`", "plans_and_what_is_done_with_them";
    NoGradientRule = "E060": "operations between parameters and the loss have no gradient", "freeze the parameters before them, or express them by other operations", "models_and_command_lines";
    LossEmpty = "E061": "the loss has no elements", "bind dimensions so that the output of the loss has some", "models_and_command_lines";
    LossScaleUnusable = "E063": "the loss scale is not positive and finite in f32", "set `precision.loss_scale` to such a number", "configurations";
    NothingTrains = "E064": "no parameter is trained: all are frozen, or no gradient reaches any", "check `params.trainable` and `params.frozen`, and what the model multiplies by zero, clips or detaches", "configurations";
    ShardingPattern = "E066": "a pattern or number of `[sharding]` fits no unit, module or number of ranks", "the message lists what there is", "configurations";
    TooManyLossElements = "E071": "a step sums more elements of the loss than an f64 counts", "lower `run.accumulation` or `sharding.ranks`", "configurations";
    ParameterDtype = "E080": "a parameter that is sharded is not f32", "export the model with float32 weights", "models_and_command_lines";
    PlanTooLarge = "E081": "the parameters of a unit, or the memory of a rank, are larger than a plan can describe: 2^40 elements, 2^50 bytes", "correct the shapes, use more ranks, or set `sharding.wrap` to smaller units", "models_and_command_lines";
    NotAPlanDirectory = "E090": "what is at the place of the plan directory is no plan", "choose another directory with `-o`", "models_and_command_lines";
    FileUnwritable = "E091": "a file or directory cannot be written", "the message has the reason of the system", "models_and_command_lines";
    PlanUnreadable = "E092": "the plan or cluster file cannot be read", "give a directory that `frit compile` wrote", "plans_and_what_is_done_with_them";
    PlanInvalid = "E093": "plan.json is no plan, or of another version of the format", "compile the model again with this version", "plans_and_what_is_done_with_them";
    PlanChanged = "E094": "files of a plan directory are not those that were compiled", "compile the model again", "plans_and_what_is_done_with_them";
    CodeGeneration = "E095": "machine code cannot be made from the kernels", "report the model", "a_linker_that_is_not_there_is_named";
    PassUnknown = "E096": "`--print-after`, `--disable-pass` or `--stop-after` names no pass, or one that does not run", "`frit passes` lists the passes", "models_and_command_lines";
    CommandLine = "E097": "a value of the command line cannot be used", "the help of the message shows the form", "models_and_command_lines";
    PassRequires = "E098": "a pass that runs needs what only a disabled one provides", "leave out the `--disable-pass` that the help names", "models_and_command_lines";
    NoCudaKernel = "E099": "operations of the model have no kernel for CUDA", "compile with `target.device = \"cpu\"`, or report the model", "models_and_command_lines";
    RunFailed = "E100": "a run cannot be started, or ended before its last step", "the message has the reason", "plans_and_what_is_done_with_them";
    NotFinite = "E101": "`--check-numerics` found a value that is infinite or no number", "the notes name the first task and its operands", "a_run_that_only_skips_steps_or_loses_its_numbers_fails";
    NumericsFile = "E102": "the file of `precision.from_numerics` is none that `frit run --numerics` wrote", "measure again with `frit run --numerics FILE`", "plans_and_what_is_done_with_them";
    Diverged = "E106": "a run learned nothing: its loss is no number, or too many steps in a row were skipped", "check the data and the learning rate; checkpoints are kept", "a_run_that_only_skips_steps_or_loses_its_numbers_fails";
    MachineLacks = "E107": "`frit doctor` found something missing that the plan needs", "the notes list what was found, and where it was looked for", "plans_and_what_is_done_with_them";
    ExportModel = "E110": "the ONNX model that is exported cannot be read as it was when it was compiled", "compile the model again", "plans_and_what_is_done_with_them";
    ExportWeights = "E111": "the trained weights cannot be read, or are not of this model", "give a checkpoint of this plan, or a file that `frit run --save` wrote", "plans_and_what_is_done_with_them";
    ExportSource = "E112": "the model that the plan was compiled from is not at hand, was changed, or is not ONNX", "name the file with `--model`, or compile it again", "plans_and_what_is_done_with_them";
    BenchPlan = "E113": "`frit bench` compares a plan in low precision with one in f32, and this is not one", "give a plan in bf16 or fp16", "plans_and_what_is_done_with_them";
    OutputUnknown = "E211": "the model has no output of the name in `loss.logits`", "the notes list its outputs", "metrics_that_fit_nothing_are_refused";
    OutputNotFloat = "E212": "the output of a loss does not hold floats", "name another output in `loss.logits`", "models_and_command_lines";
    NoClassAxis = "E213": "the output of a loss has no such axis of classes", "set `loss.class_axis` within its rank", "configurations";
    LossNotScalar = "E214": "`loss.kind = \"output\"` names an output that is not one number", "name a scalar output in `loss.logits`, or choose another `loss.kind`", "configurations";
    LabelsMismatch = "E215": "the model has an input of the name of the labels, with another type or shape", "set `loss.labels` to another name, or `loss.class_axis`", "models_and_command_lines";
    ClassAxisAmbiguous = "E216": "two axes of the output may be that of the classes", "say which in `loss.class_axis`", "models_and_command_lines";
    OutputUnusable = "E217": "a loss or metric cannot be made of this output: it is a parameter, or has too few classes", "name what the model computes, or ask for fewer classes", "metrics_that_fit_nothing_are_refused";
    MetricUnknownOutput = "E218": "a metric is asked for without an output, and not exactly one loss has one", "name an output and its labels, as in `\"accuracy(logits, labels)\"`", "metrics_that_fit_nothing_are_refused";
    TwoLowPrecisions = "E220": "f16 and bf16 in one plan", "use one of them everywhere", "configurations";
    ComputeDtype = "E221": "`precision.compute` or an override is not fp32, bf16 or fp16", "choose one of these", "only_f32_f16_and_bf16_compute";
    DropoutEscapes = "E230": "the mask of a dropout is read by an operation that evaluation cannot do without", "give the operation what the dropout returns", "integers_have_no_mean";
    // Warnings.
    ParametersMissing = "W030": "parameters of the PyTorch module are not in the exported graph", "export with `optimize=False`", "parameters_that_an_exporter_computed_with_are_warned_of";
    BatchNormFolded = "W035": "batch normalizations were folded into convolutions, which train without them", "export the module in training mode, without constant folding", "folded_batch_normalizations_are_warned_of";
    BatchNormFixed = "W036": "batch normalizations keep their running statistics", "set `model.batch_norm = \"train\"` to use those of the batch", "as_exported_keeps_running_statistics_with_a_warning";
    TiedCopies = "W037": "two parameters have equal elements and train apart", "if they are one, set `model.tie_weights = true`", "a_transposed_copy_is_warned_of_or_tied";
    DetachRemoved = "W038": "the exporter removed a `detach()`: gradients flow where PyTorch stops them", "export with `optimize=False`", "a_detach_that_the_exporter_removed_is_warned_of";
    NotReached = "W039": "float tensors of the module were computed into constants or are not read, and do not train", "if they are buffers, list them under `params.ignored`", "folded_batch_normalizations_are_warned_of";
    NoGradientPath = "W061": "parameters that are listed as trainable get no gradient", "the notes say where the path ends", "parameters_without_a_gradient_are_named_with_where_it_ends";
    GroupCoversNothing = "W066": "a parameter group covers no parameter", "`frit inspect --view units` lists the names", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    PatternCoversNothing = "W067": "a pattern of `[params]` covers no parameter", "the help names the nearest", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    Interpreted = "W098": "the IR interpreter executes operations, which is slow", "report the model", "what_has_no_kernel_is_the_interpreters_and_is_warned_of";
    RandomInInference = "W110": "the exported model draws random numbers in inference too", "take them out of the module", "whatever_trains_is_exported_in_inference_mode";
    BatchStatisticsInInference = "W111": "a normalization of the exported model uses the statistics of the batch in inference too", "give it running statistics", "whatever_trains_is_exported_in_inference_mode";
    OverrideUnused = "W221": "an override of `[[precision.override]]` applies to nothing", "the help names the nearest", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    // Contracts of passes: an error is a mistake of Frit.
    PassFailed = "B001": "a pass was given, or made, what it cannot work with", "", "only_internal_errors_are_given_a_reproducer";
    PassOrder = "B010": "a pass needs a fact that no pass before it provides", "", "a_pass_too_early_is_named";
    // Invariants of graphs, proved after passes: an error is a mistake of Frit.
    OperandUndefined = "V101": "an operand is a result of a live, earlier node", "", "v101_operand_of_a_later_or_removed_node";
    OutputUndefined = "V102": "an output, and the leaf that a carry names, is a result of a live node", "", "v102_output_or_carried_leaf_of_a_removed_node";
    LeafTwice = "V103": "no two leaves of one kind share a key", "", "v103_leaves_of_one_key";
    CarryWithoutLeaf = "V104": "a carry names a `param` or `state` leaf", "", "v104_to_v106_carries";
    CarriedType = "V105": "the carried value has the type of that leaf", "", "v104_to_v106_carries";
    CarriedTwice = "V106": "a leaf is carried at most once", "", "v104_to_v106_carries";
    OutputTwice = "V107": "no two outputs of one kind share a name", "", "v107_to_v109_outputs";
    NotAScalar = "V108": "loss sum, loss count and metrics are scalars", "", "v107_to_v109_outputs";
    GradientWithoutParameter = "V109": "a gradient is named after a parameter and has its shape", "", "v107_to_v109_outputs";
    NoRanks = "V110": "a program runs on at least one rank", "", "v110_no_rank";
    FusionBody = "V111": "a fusion's body has no leaf but inputs and constants, no collective, no optimizer, no fusion, and plain outputs only", "", "v111_body_of_a_fusion";
    OperandsMisfit = "V201": "the operands of a node fit its operation", "", "v201_and_v202_types";
    RecordedType = "V202": "recorded types are those that the operation infers", "", "v201_and_v202_types";
    EightBitValue = "V203": "no value is an 8-bit float, which no operation computes with", "", "v203_eight_bit_floats";
    ShardedUse = "V301": "a sharded value is used only by pointwise operations (alone or fused), `optimizer_step`, `ema_step`, `grad_stats`, `all_gather`, and an `all_reduce` of its unit over replicas", "", "v301_to_v303_uses_of_sharded_values";
    GatheredReplicated = "V302": "what `all_gather` gathers is sharded", "", "v301_to_v303_uses_of_sharded_values";
    ShardedOperands = "V303": "a pointwise operation or optimizer step on a sharded value has only scalars and sharded values of the same shape as operands, and the state that an optimizer keeps whole", "", "v301_to_v303_uses_of_sharded_values";
    ShardedGradient = "V304": "the gradient of a sharded parameter with an optimizer step comes from exactly one `reduce_scatter`, and from at most one `all_reduce`", "", "v304_and_v305_reductions";
    ReplicatedGradient = "V305": "the gradient of a replicated parameter with an optimizer step comes from at most one `all_reduce`, and from no `reduce_scatter`", "", "v304_and_v305_reductions";
    CollectiveUnit = "V306": "collectives of a parameter carry its unit", "", "v306_units";
    CarrySharding = "V307": "a carried value is sharded exactly if its leaf is", "", "v307_and_v308_outputs";
    ShardedResult = "V308": "results, loss and metrics are not sharded", "", "v307_and_v308_outputs";
    ForwardReads = "V401": "a forward node reads only forward values", "", "v401_to_v403_regions";
    BackwardReads = "V402": "a backward or recompute node never reads a value of the update", "", "v401_to_v403_regions";
    UpdateRegion = "V403": "optimizer, schedule and scaler run in the update", "", "v401_to_v403_regions";
    // Invariants of plans, proved before a plan is written: an error is a mistake of Frit, or an edited plan.
    PlanMalformed = "P001": "indices, ranges and sizes of a plan lie within what they are of", "", "parts_that_few_ranks_keep";
    ReadBeforeWrite = "P101": "every byte that is read was written before, or is persistent", "", "bytes";
    UseAfterFree = "P102": "bytes are read through the buffer through which they were written (no use after free)", "", "bytes";
    WriteUnordered = "P103": "a write is ordered after every earlier access of another stream to the same bytes", "", "bytes";
    ReadUnordered = "P104": "a read is ordered after the write it sees", "", "bytes";
    OtherDtype = "P105": "bytes are read in the dtype in which they were written, and parameters in that in which they are held", "", "bytes";
    MeaningChanged = "P106": "every task reads what lowering wrote for it, and the step leaves what it was to leave", "", "the_meaning_of_the_program";
    OperandOverwritten = "P107": "the results of a task lie over none of its operands and not over one another, unless a result is exactly an operand and its kernel reads every element of that only to write the same one: an optimizer step, a sum or another elementwise operation of equal shapes; or all ranks combine a value in its place", "", "results_on_operands";
    CollectiveAlone = "P201": "no rank exchanges data with itself alone", "", "a_collective_of_one_rank";
    GatheredUnread = "P202": "every gathered group is read before it is overwritten or, unless it is kept, the phase ends", "", "collectives";
    ReductionMissing = "P203": "every trainable group is reduced by one reduce-scatter if it is sharded, and by one all-reduce if it has replicas, each as a mean; in f16 as a sum, whose division P308 follows", "", "collectives";
    FrozenReduced = "P204": "groups that are frozen are not reduced", "", "collectives";
    CollectiveStreams = "P205": "collectives of one kind run on one stream", "", "collectives";
    KeptParts = "P206": "ranks that gather among some what they kept, kept it, as parts for as many, of what all of the group's gathered in the same dtype and phase", "", "parts_that_few_ranks_keep";
    Owners = "P301": "every parameter has exactly one owner: one segment of one group, or a buffer", "", "the_update";
    OptimizerSteps = "P302": "exactly one optimizer step writes each trainable parameter, with its group or, by Adafactor, by itself, and none a frozen one", "", "the_update";
    BackwardSeed = "P303": "the seed of the backward pass is scale / (C·A), once", "", "the_update";
    Unscaling = "P304": "gradients are unscaled once, by a factor of capacity C·A·N", "", "the_update";
    StatisticsMissing = "P305": "the norm and the finite check count every trainable group's gradient exactly once", "", "the_update";
    StatisticsOfOneRank = "P306": "with several ranks, the statistics that decide on the step are summed over ranks", "", "the_update";
    OptimizerOperands = "P307": "the optimizer reads the gradient, factor and finite flag that were checked", "", "the_update";
    GradientFactor = "P308": "what is clipped and what the optimizer reads has exactly the factor 1 / (C·A·N)", "", "the_factor_of_every_gradient";
    ScaledUse = "P309": "a scaled value is only used linearly, and only added to values of the same factor", "", "the_factor_of_every_gradient";
    SummedSteps = "P310": "it sums every micro-step of this step once, and no other, over the ranks once", "", "the_factor_of_every_gradient";
    ElementsCounted = "P311": "the statistics that decide on the step, and the sums by which it is sized, count every gradient element once over all ranks", "", "steps_of_adafactor";
    ParameterGroups = "P312": "parameter groups begin where parameters do, and the optimizer reads where", "", "averages_and_parameter_groups";
    ScalerUpdate = "P313": "loss scale and step count change in the update, by the finite flag that was checked", "", "state_changes_once_and_by_the_checked_flag";
    AmaxHistory = "P314": "every tensor that is rounded to an 8-bit float has a row of the history, in one format; the history is renewed once per micro-step, with several ranks by the largest magnitude over all of them", "", "magnitudes_of_8_bit_floats";
    AdafactorParts = "P315": "an Adafactor step of a parameter has each of its parts once, and each reads the parameter, its gradient, and what the parts before it made of them", "", "steps_of_adafactor";
    FirstValues = "P316": "the state of parameters and the counts of steps begin at zero, the loss scale above it", "", "inputs_and_first_values_are_what_the_tasks_need";
    MovingAverage = "P317": "with a moving average, one step of it per trainable group, after the optimizer's and by the same finite flag", "", "averages_and_parameter_groups";
    EvaluationWrites = "P401": "nothing that outlives the phase is written but its outputs and statistics", "", "broken_evaluations_are_found";
    EvaluationIncomplete = "P402": "every output and the statistics are written, wholly", "", "broken_evaluations_are_found";
    EvaluationSums = "P403": "with several ranks, the statistics are summed over ranks once", "", "broken_evaluations_are_found";
    EvaluationDropout = "P404": "no mask of a dropout is drawn", "", "broken_evaluations_are_found";
    EvaluationRanks = "P405": "the evaluation has the ranks of the training", "", "an_evaluation_that_holds_parameters_otherwise_is_refused";
    EvaluationElements = "P406": "of every parameter that both use, each rank holds the same elements, in the same dtype, in both", "", "an_evaluation_that_holds_parameters_otherwise_is_refused";
    HostReach = "P501": "only copies between device and host reach host memory", "", "host_memory";
    HostStreams = "P502": "those from the host run on one stream, those to the host on another, and nothing else there", "", "host_memory";
    IndexRanges = "P601": "an input that a task reads as indices or labels may hold only what that task takes: what is fed is checked by its range, and by nothing else before the task runs; what has no elements holds nothing", "", "inputs_that_are_read_as_indices";
    InputBounds = "P602": "a task reads no more of an input than is fed, and an input has examples if it has axes", "", "inputs_and_first_values_are_what_the_tasks_need";
}

impl Code {
    /// The code of this id, in any case.
    pub fn find(id: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.id().eq_ignore_ascii_case(id))
    }

    /// Whether it is for a mistake of Frit: a broken contract of a pass, of a graph or of a plan.
    pub fn is_internal(self) -> bool {
        self.remedy().is_empty()
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// The text of `docs/errors.md`.
pub fn document() -> String {
    let mut text = HEAD.to_string();
    for (title, says, letter) in PARTS {
        let internal = !matches!(letter, 'E' | 'W');
        let _ = write!(text, "\n## {title}\n\n{says}\n\n");
        text += if internal {
            "| code | must hold | test |\n|---|---|---|\n"
        } else {
            "| code | means | what to do | test |\n|---|---|---|---|\n"
        };
        for code in Code::ALL.iter().filter(|c| c.id().starts_with(letter)) {
            let _ = match internal {
                true => writeln!(text, "| {code} | {} | `{}` |", code.meaning(), code.test()),
                false => writeln!(
                    text,
                    "| {code} | {} | {} | `{}` |",
                    code.meaning(),
                    code.remedy(),
                    code.test()
                ),
            };
        }
    }
    text
}

const HEAD: &str = "\
# Error codes

Every message has a code, the place it is about as node and scope, and what to do. `frit explain CODE` prints a row of this page.
Codes of lints (`L02`) are in [lints.md](lints.md). The last column names the test that raises a code.

A program ends with 2 if something is wrong with what it was given, with 1 if a run failed though nothing was (E101, E106), else with 0.
";

const PARTS: [(&str, &str, char); 5] = [
    ("Errors", "The command did nothing, or nothing further.", 'E'),
    ("Warnings", "The plan is made; it may not be what was meant.", 'W'),
    ("Contracts of passes", INTERNAL, 'B'),
    (
        "Invariants of graphs",
        "Checked after every pass that changed a graph, with `--verify-each` in release builds too.",
        'V',
    ),
    (
        "Invariants of plans",
        "Proved before a plan is written, and by `frit verify`: of a plan that was edited, an error says what is wrong with it.",
        'P',
    ),
];
const INTERNAL: &str =
    "An error is a mistake of Frit; report the model and the folder that the message names.";
