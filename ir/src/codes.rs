//! Diagnostic codes with meaning, remedy and test; `docs/errors.md` is generated from this table.

use std::fmt::{self, Write};

/// Defines [`Code`] by rows `Name = "id": "meaning", "remedy", "test";`.
macro_rules! codes {
    ($($name:ident = $id:literal: $meaning:literal, $remedy:literal, $test:literal;)*) => {
        /// The code of a diagnostic.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code {
            $(#[doc = $meaning] $name,)*
        }

        impl Code {
            /// All codes, in order.
            pub const ALL: &[Code] = &[$(Code::$name),*];

            /// The stable id that messages show: `E010`.
            pub const fn id(self) -> &'static str {
                match self { $(Code::$name => $id),* }
            }

            /// The name in source code: `ModelUnreadable`.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$name => stringify!($name)),* }
            }

            /// The problem; for codes of invariants, the invariant.
            pub const fn meaning(self) -> &'static str {
                match self { $(Code::$name => $meaning),* }
            }

            /// What to do; empty for bugs in Frit.
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
    ModelUnreadable = "E010": "the model file cannot be read", "give the path of an .onnx, .pt2 or .json file", "models_and_command_lines";
    NotAnOnnxModel = "E011": "the file is not a complete ONNX model: it is truncated, of another format, or has no graph or output", "export the model again", "models_and_command_lines";
    GraphCycle = "E012": "the nodes of the model form a cycle", "export the model again; the notes list the nodes", "broken_graphs_are_named";
    InitializerUnreadable = "E013": "the elements of an initializer, in the model file or in its external data, cannot be read", "keep external data files beside the model, under their original names", "external_data_is_read_in_place_or_missed_by_name";
    OperandMismatch = "E014": "a node cannot take its operands: their number, shapes, dtypes or attributes are invalid for the operator", "the notes list the operands; correct the model, or bind dimensions so that they match", "misfits_show_operands";
    ValueUndefined = "E015": "a node or output refers to an undefined value", "the file is damaged or was edited; export the model again", "broken_graphs_are_named";
    ValueDefinedTwice = "E016": "two nodes, inputs or initializers define the same value", "the file is damaged or was edited; export the model again", "broken_graphs_are_named";
    ImportLimit = "E017": "importing would exceed a limit of `[import]` on nodes, elements, operations, bytes or nesting depth", "if the model is meant to be this large, raise the limit that the message names", "what_is_made_is_counted_and_the_key_is_named";
    ReservedName = "E018": "the name of an input or output begins with `frit.`, or one of them or a parameter is named `__metadata__`, as no tensor of a .safetensors file", "rename it", "reserved_names_are_refused_and_all_others_are_free";
    OutputNamedTwice = "E019": "two outputs of the model have the same name", "remove or rename one", "two_outputs_of_one_name_are_refused_by_name";
    DimensionUnknown = "E020": "a dimension of an input has no size, or size 0", "bind it with `--bind NAME=N`, or export the model with a static size", "dimensions_must_be_bound_and_known";
    BindUnknown = "E021": "`--bind` names a dimension that the model does not have", "the message lists the dimensions of the model", "dimensions_must_be_bound_and_known";
    OperatorUnsupported = "E031": "the model contains unsupported operators", "`frit compile --list-ops` lists the supported ones", "everything_unsupported_is_reported_at_once";
    AttributeUnsupported = "E032": "an operator has an unsupported attribute, attribute value or output type", "export the model without it", "everything_unsupported_is_reported_at_once";
    OpsetUnsupported = "E033": "the model states no ONNX opset, or an unsupported one", "export it with `opset_version=18`, or convert it with `onnx.version_converter`", "opsets_and_foreign_files_are_refused";
    DependsOnData = "E034": "a shape, axis or condition depends on run-time data", "bind all dimensions, or export the model so that it is constant", "a_condition_that_depends_on_data_is_named";
    ArchiveUnreadable = "E035": "the archive of torch.export is damaged, of another version, or contradicts itself", "save it with `torch.export.save(program, \"model.pt2\")` of PyTorch 2.9 or later", "damaged_archives_are_refused";
    NoBatchNorm = "E036": "`model.batch_norm` is set, but the model has no BatchNormalization", "export the module in training mode, without constant folding", "models_and_command_lines";
    NotAJsonModel = "E040": "the file is not JSON, or not a model in the JSON format", "docs/json-model.md describes the format; the message gives line and column", "models_and_command_lines";
    JsonModelInvalid = "E041": "a JSON model has an unknown version, name, operation or dimension", "correct the place that the message names", "models_and_command_lines";
    ConfigUnreadable = "E050": "the configuration file cannot be read, or is not TOML", "give the path of a train.toml", "configurations";
    ConfigValue = "E051": "a key of the configuration has a value of the wrong type or out of range", "`frit compile --help-config` lists keys, types and ranges", "configurations";
    ConfigKeyUnknown = "E052": "unknown configuration key", "`frit compile --help-config` lists the keys", "configurations";
    ConfigContradiction = "E053": "values of the configuration contradict each other, or name something the model does not have", "the help of the message says which to change", "configurations";
    ArchUnknown = "E055": "`target.arch` is not a supported processor, or does not support a requested feature", "the message lists the supported ones", "configurations";
    ClusterInvalid = "E056": "a cluster description is not TOML, or has unknown keys or invalid values", "start from a built-in cluster: `base = \"h100\"`", "plans_and_what_is_done_with_them";
    NeedsAnotherSetting = "E057": "a setting requires something that the target or another setting does not provide", "the help of the message says which to change", "configurations";
    BudgetTooSmall = "E058": "no plan fits `memory.budget`", "the message gives the smallest budget that suffices", "configurations";
    NoGradientRule = "E060": "operations between parameters and the loss have no gradient", "freeze the parameters before them, or replace these operations", "models_and_command_lines";
    FunctionGradient = "E062": "a function and the gradient function that it names do not fit: there is none of that name, it takes or gives another number of values, or gives a gradient of another shape or of integers", "docs/custom-gradients.md says what a gradient function takes and gives", "gradient_functions_that_do_not_fit_are_refused";
    FunctionPrecision = "E065": "a function states a precision that is not f32, f16 or bf16", "choose one of these, or leave `frit.precision` out", "gradient_functions_that_do_not_fit_are_refused";
    LossEmpty = "E061": "the loss has no elements", "bind dimensions so that the output of the loss is not empty", "models_and_command_lines";
    LossScaleUnusable = "E063": "the loss scale is not positive and finite in f32", "set `precision.loss_scale` to a positive finite number", "configurations";
    NothingTrains = "E064": "no parameter trains: all are frozen, or no gradient reaches any", "check `params.trainable` and `params.frozen`, and what the model multiplies by zero, clips or detaches", "configurations";
    ShardingPattern = "E066": "a pattern or number of `[sharding]` matches no unit or module, or does not divide the ranks", "the message lists the valid ones", "configurations";
    MuonMatrices = "E068": "Muon is to step a parameter that is not a matrix", "let the pattern of the `[[optimizer.group]]` cover matrices alone", "muon_steps_matrices_alone";
    TooManyLossElements = "E071": "a step sums more loss elements than an f64 can count exactly", "lower `run.accumulation` or `sharding.ranks`", "configurations";
    ParameterDtype = "E080": "a sharded parameter is not f32", "export the model with float32 weights", "models_and_command_lines";
    PlanTooLarge = "E081": "the parameters of a unit, or the memory of a rank, are larger than a plan can describe: 2^39 elements, 2^50 bytes", "correct the shapes, use more ranks, or set `sharding.wrap` to smaller units", "models_and_command_lines";
    NotAPlanDirectory = "E090": "the output path exists and is not a plan directory", "choose another directory with `-o`", "models_and_command_lines";
    FileUnwritable = "E091": "a file or directory cannot be written", "the message gives the reason reported by the system", "models_and_command_lines";
    PlanUnreadable = "E092": "the plan or cluster file cannot be read", "give a directory that `frit compile` wrote", "plans_and_what_is_done_with_them";
    PlanInvalid = "E093": "plan.json is not a plan, or has another format version", "compile the model again with this version", "plans_and_what_is_done_with_them";
    PlanChanged = "E094": "files of a plan directory are not the ones that were compiled", "compile the model again", "plans_and_what_is_done_with_them";
    CodeGeneration = "E095": "generating machine code failed", "report the model", "a_linker_that_is_not_there_is_named";
    PassUnknown = "E096": "`--print-after`, `--disable-pass` or `--stop-after` names an unknown pass, or one that does not run", "`frit passes` lists the passes", "models_and_command_lines";
    CommandLine = "E097": "a command line value is invalid", "the help of the message shows the expected form", "models_and_command_lines";
    PassRequires = "E098": "a pass requires a property that only a disabled pass ensures", "remove the `--disable-pass` that the help names", "models_and_command_lines";
    NoCudaKernel = "E099": "operations of the model have no CUDA kernel", "compile with `target.device = \"cpu\"`, or report the model", "models_and_command_lines";
    RunFailed = "E100": "a run could not start, or ended before its last step", "the message gives the reason", "plans_and_what_is_done_with_them";
    NotFinite = "E101": "`--check-numerics` found an infinity or NaN", "the notes name the first task and its operands", "a_run_that_only_skips_steps_or_loses_its_numbers_fails";
    NumericsFile = "E102": "the file of `precision.from_numerics` was not written by `frit run --numerics`", "measure again with `frit run --numerics FILE`", "plans_and_what_is_done_with_them";
    Diverged = "E106": "a run failed to train: its loss is not finite, too many consecutive steps were skipped, or the gradients of all steps, 10 or more, are zero", "check the data, the learning rate and what the loss reads; checkpoints are kept", "a_run_that_only_skips_steps_or_loses_its_numbers_fails";
    GradientsDiffer = "E108": "`frit check-gradients` found a gradient function that differs from finite differences of its function", "of a straight-through estimator or a gradient reversal this is meant; correct any other", "gradients_are_checked_against_finite_differences";
    MachineLacks = "E107": "`frit doctor` found that something the plan needs is missing", "the notes list what was found, and where it was searched", "the_doctor_needs_no_gpu_and_fails_only_for_what_a_plan_lacks";
    ExportModel = "E110": "the ONNX model to export cannot be read as it was when compiled", "compile the model again", "plans_and_what_is_done_with_them";
    ExportWeights = "E111": "the trained weights cannot be read, or belong to another model", "give a checkpoint of this plan, or a file that `frit run --save` wrote", "plans_and_what_is_done_with_them";
    ExportSource = "E112": "the model that the plan was compiled from is missing, was changed, or is not ONNX", "pass its path with `--model`, or compile it again", "plans_and_what_is_done_with_them";
    Tokenize = "E114": "a text or tokenizer cannot be read, or the separator is not in the vocabulary", "the message names the file, and the line of a .jsonl", "texts_that_cannot_be_tokenized_are_refused";
    ReportInput = "E115": "a file for `frit report` cannot be read, is not of metrics or a trace, or is a trace of another plan", "give files that `frit run --metrics` and `frit run --trace` wrote; a trace only of the same plan", "files_that_are_no_runs_are_refused";
    AuditFailed = "E116": "`frit audit` found a loss, gradient, update, rank or kernel that is not what it must be", "the notes list what differs; do not train with the plan, and if it was not edited, report it with the model", "an_audit_catches_what_a_plan_computes_wrong";
    AuditPlan = "E117": "`frit audit` cannot audit this plan: it does not train, is for several GPUs, or its interpretation would take too long", "audit a small model of the same layers, or fewer parameters", "what_cannot_be_audited_is_refused";
    PlanEdited = "E118": "`frit verify` found that a plan, or its trace of the passes, is not what its model compiles to, or that it has no such trace", "it was edited, or compiled by another version: compile the model again", "edited_plans_with_new_digests_are_refused_with_a_code";
    NotCertified = "E119": "`frit verify` found that a pass of a plan did not keep what it must keep, or cannot prove that it did", "the notes name the first outputs that differ: compile the model again", "plans_that_are_not_certified_are_refused_with_a_code";
    BenchPlan = "E113": "`frit bench` compares a low-precision plan with f32, and this plan is not low-precision", "give a plan in bf16 or fp16", "plans_and_what_is_done_with_them";
    OutputUnknown = "E211": "the model has no output named as in `loss.logits`", "the notes list its outputs", "metrics_that_fit_nothing_are_refused";
    OutputNotFloat = "E212": "the output of a loss is not a float tensor", "name another output in `loss.logits`", "models_and_command_lines";
    NoClassAxis = "E213": "`loss.class_axis` is not an axis of the output of the loss", "set `loss.class_axis` within its rank", "configurations";
    LossNotScalar = "E214": "`loss.kind = \"output\"` names an output that is not a scalar", "name a scalar output in `loss.logits`, or choose another `loss.kind`", "configurations";
    LabelsMismatch = "E215": "the model has an input with the name of the labels and another type or shape", "set `loss.labels` to another name, or `loss.class_axis`", "models_and_command_lines";
    ClassAxisAmbiguous = "E216": "two axes of the output could be the class axis", "set `loss.class_axis`", "models_and_command_lines";
    OutputUnusable = "E217": "an output cannot be used for a loss or metric: it is a parameter, or has too few classes", "name an output that the model computes, or ask for fewer classes", "metrics_that_fit_nothing_are_refused";
    MetricUnknownOutput = "E218": "a metric names no output, and does not apply to exactly one loss", "name an output and its labels, as in `\"accuracy(logits, labels)\"`", "metrics_that_fit_nothing_are_refused";
    TwoLowPrecisions = "E220": "the plan contains both f16 and bf16", "use only one of them", "configurations";
    ComputeDtype = "E221": "`precision.compute` or an override is not fp32, bf16 or fp16", "choose one of these", "only_f32_f16_and_bf16_compute";
    AdapterTarget = "E231": "a pattern of `adapter.targets` matches no module whose weight is only the right operand of matmuls", "the help names the nearest modules", "targets_that_have_no_weight_are_refused";
    DocumentsMix = "E240": "with `data.document_separator`, the model joins tokens otherwise than by attention, or reads no single sequence of tokens", "remove the key, and give each document an example of its own", "models_that_join_tokens_otherwise_are_refused";
    DropoutEscapes = "E230": "the mask of a dropout is read by an operation that evaluation needs", "use the result of the dropout as the operand instead", "masks_are_read_by_choices_and_casts_alone";
    // Warnings.
    WeightsNotFinite = "W031": "parameters of the model have NaN, or infinity in one that trains", "correct the model, or start from other weights with `frit run --weights`; name masks that are parameters in `params.frozen`", "weights_that_are_not_finite_are_said_before_the_first_step";
    SettingUnused = "W053": "a setting that was written has no effect beside another", "the help says with which value of the other it has one; set that, or remove the key", "settings_that_have_no_effect_are_warned_of";
    ParametersMissing = "W030": "parameters of the PyTorch module, or a part of what reads them, are missing in the exported graph", "export with `optimize=False`", "parameters_that_an_exporter_computed_with_are_warned_of";
    BatchNormFolded = "W035": "batch normalizations were folded into convolutions and do not train", "export the module in training mode, without constant folding", "folded_batch_normalizations_are_warned_of";
    BatchNormFixed = "W036": "batch normalizations use fixed running statistics", "set `model.batch_norm = \"train\"` to use batch statistics", "as_exported_keeps_running_statistics_with_a_warning";
    TiedCopies = "W037": "two parameters have equal elements and train separately", "if they are tied, set `model.tie_weights = true`", "a_transposed_copy_is_warned_of_or_tied";
    DetachRemoved = "W038": "the exporter removed a `detach()`: gradients flow where PyTorch stops them", "export with `optimize=False`", "a_detach_that_the_exporter_removed_is_warned_of";
    NotReached = "W039": "float tensors of the module were folded into constants or are never read, and do not train", "if they are buffers, list them under `params.ignored`", "folded_batch_normalizations_are_warned_of";
    OutputLeftOut = "W040": "outputs that no loss can read are left out: their operators are not supported", "nothing; `frit export` writes the model with them", "outputs_that_no_loss_can_read_need_no_operators";
    WeightsAreConstants = "W041": "weights of matmuls, convolutions and recurrent layers are constants in the model, not initializers, and do not train", "the help says how to make initializers of them", "weights_in_constants_are_warned_of";
    NoGradientPath = "W061": "parameters listed as trainable receive no gradient", "the notes say where the path ends", "parameters_without_a_gradient_are_named_with_where_it_ends";
    GroupCoversNothing = "W066": "a parameter group matches no parameter", "`frit inspect --view units` lists the names", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    PatternCoversNothing = "W067": "a pattern of `[params]` matches no parameter", "the help names the nearest names", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    MuonStepsNothing = "W068": "with `optimizer.kind = \"muon\"`, no parameter is a matrix of a hidden layer: AdamW steps all", "set `optimizer.kind = \"adamw\"`, or name matrices in an `[[optimizer.group]]`", "muon_steps_matrices_alone";
    DecayPartly = "W069": "a parameter group excludes norms or biases from weight decay, and other norms or biases decay", "set `optimizer.decay = \"matrices\"`, or name the others in an `[[optimizer.group]]`", "norms_that_decay_beside_excluded_ones_are_warned_of";
    MatricesFrozen = "W070": "only norms and biases train, as all matrices are frozen", "nothing, if that is meant; otherwise check `params.trainable` and `params.frozen`", "a_model_of_which_only_norms_train_is_warned_of";
    Interpreted = "W098": "operations have no kernel and run in the IR interpreter, which is slow", "report the model", "what_has_no_kernel_is_the_interpreters_and_is_warned_of";
    RandomInInference = "W110": "the exported model draws random numbers in inference", "remove the random operators from the module", "whatever_trains_is_exported_in_inference_mode";
    BatchStatisticsInInference = "W111": "a normalization of the exported model uses batch statistics in inference", "give it running statistics", "whatever_trains_is_exported_in_inference_mode";
    RunIncomplete = "W115": "a file of metrics is empty or has lines that cannot be read; the others are drawn", "nothing, if the run was killed or still runs", "runs_are_drawn_with_all_of_their_steps";
    OverrideUnused = "W221": "an override of `[[precision.override]]` matches nothing", "the help names the nearest names", "patterns_that_cover_nothing_are_said_with_the_nearest_names";
    // Contracts of passes: an error is a bug in Frit.
    PassFailed = "B001": "a pass received or produced an invalid graph", "", "only_internal_errors_are_given_a_reproducer";
    PassOrder = "B010": "a pass requires a property that no earlier pass ensures", "", "a_pass_too_early_is_named";
    // Invariants of graphs, checked after passes: an error is a bug in Frit.
    OperandUndefined = "V101": "an operand is a result of a live, earlier node", "", "v101_operand_of_a_later_or_removed_node";
    OutputUndefined = "V102": "an output, and the leaf that a carry names, is a result of a live node", "", "v102_output_or_carried_leaf_of_a_removed_node";
    LeafTwice = "V103": "leaves of one kind have distinct keys", "", "v103_leaves_of_one_key";
    CarryWithoutLeaf = "V104": "a carry names a `param` or `state` leaf", "", "v104_to_v106_carries";
    CarriedType = "V105": "the carried value has the type of that leaf", "", "v104_to_v106_carries";
    CarriedTwice = "V106": "a leaf is carried at most once", "", "v104_to_v106_carries";
    OutputTwice = "V107": "outputs of one kind have distinct names", "", "v107_to_v109_outputs";
    NotAScalar = "V108": "loss sum, loss count and metrics are scalars", "", "v107_to_v109_outputs";
    GradientWithoutParameter = "V109": "a gradient is named after a parameter and has its shape", "", "v107_to_v109_outputs";
    NoRanks = "V110": "a program has at least one rank", "", "v110_no_rank";
    FusionBody = "V111": "the leaves of a fusion's body are inputs and constants; it contains no collective, optimizer or fusion, and only plain outputs", "", "v111_body_of_a_fusion";
    OperandsMisfit = "V201": "the operands of a node are valid for its operation", "", "v201_and_v202_types";
    RecordedType = "V202": "recorded types equal the inferred types", "", "v201_and_v202_types";
    EightBitValue = "V203": "no value is an 8-bit float, since no operation computes in one", "", "v203_eight_bit_floats";
    ShardedUse = "V301": "a sharded value is used only by pointwise operations (alone or fused), `optimizer_step`, `ema_step`, `grad_stats`, `all_gather`, and an `all_reduce` of its unit over replicas", "", "v301_to_v303_uses_of_sharded_values";
    GatheredReplicated = "V302": "the operand of an `all_gather` is sharded", "", "v301_to_v303_uses_of_sharded_values";
    ShardedOperands = "V303": "the other operands of a pointwise operation or optimizer step on a sharded value are scalars, sharded values of the same shape, or state that the optimizer replicates", "", "v301_to_v303_uses_of_sharded_values";
    ShardedGradient = "V304": "the gradient of a sharded parameter with an optimizer step comes from exactly one `reduce_scatter`, and from at most one `all_reduce`", "", "v304_and_v305_reductions";
    ReplicatedGradient = "V305": "the gradient of a replicated parameter with an optimizer step comes from at most one `all_reduce`, and from no `reduce_scatter`", "", "v304_and_v305_reductions";
    CollectiveUnit = "V306": "collectives of a parameter are tagged with its unit", "", "v306_units";
    CarrySharding = "V307": "a carried value is sharded if and only if its leaf is", "", "v307_and_v308_outputs";
    ShardedResult = "V308": "results, loss and metrics are not sharded", "", "v307_and_v308_outputs";
    ForwardReads = "V401": "a forward node reads only forward values", "", "v401_to_v403_regions";
    BackwardReads = "V402": "a backward or recompute node never reads a value of the update", "", "v401_to_v403_regions";
    UpdateRegion = "V403": "optimizer, schedule and scaler nodes belong to the update", "", "v401_to_v403_regions";
    CotangentEscapes = "V501": "a call has one `custom_gradient`, and what is computed of its cotangents is read only there, as a gradient", "", "v501_and_v502_functions";
    PrecisionEscapes = "V502": "what the forward pass computes of the operands that enter the precision of a call is read outside only as it leaves", "", "v501_and_v502_functions";
    // Invariants of plans, checked before a plan is written: an error is a bug in Frit, or an edited plan.
    PlanMalformed = "P001": "every index, range and size of a plan is within bounds", "", "parts_that_few_ranks_keep";
    ReadBeforeWrite = "P101": "every byte is written before it is read, or is persistent", "", "bytes";
    UseAfterFree = "P102": "bytes are read through the buffer through which they were written (no use after free)", "", "bytes";
    WriteUnordered = "P103": "a write is ordered after every earlier access to the same bytes on another stream", "", "bytes";
    ReadUnordered = "P104": "a read is ordered after the write whose value it reads", "", "bytes";
    OtherDtype = "P105": "bytes are read in the dtype in which they were written, and parameters in their stored dtype", "", "bytes";
    MeaningChanged = "P106": "every task reads the values that lowering recorded for it, and the step leaves the recorded values behind", "", "the_meaning_of_the_program";
    OperandOverwritten = "P107": "a task's results overlap neither its operands nor each other, unless a result covers exactly one operand and the kernel reads each element only to write the same one (an optimizer step, a sum or another elementwise operation of equal shapes, a matrix to which a GEMM is added, a table to which the gradient of an embedding is added, a level of a sum in a tree), or the result is the gradient of a cross-entropy over its logits, or the task is an in-place collective", "", "results_on_operands";
    CollectiveAlone = "P201": "no collective has a single participant", "", "a_collective_of_one_rank";
    GatheredUnread = "P202": "every gathered group is read before it is overwritten or, unless it stays gathered, the phase ends", "", "collectives";
    ReductionMissing = "P203": "every trainable group is reduced by one reduce-scatter if it is sharded, and by one all-reduce if it has replicas, each as a mean; in f16, and in reproducible plans, as a sum, whose division P308 checks", "", "collectives";
    FrozenReduced = "P204": "frozen groups are not reduced", "", "collectives";
    CollectiveStreams = "P205": "collectives of one kind run on one stream", "", "collectives";
    KeptParts = "P206": "a gather among some of the ranks reads the parts they kept: a split, over that number of ranks, of the whole group gathered in the same dtype and phase", "", "parts_that_few_ranks_keep";
    Owners = "P301": "every parameter has exactly one location: one segment of one group, or a buffer", "", "the_update";
    OptimizerSteps = "P302": "exactly one optimizer step writes each trainable parameter, with its group or, with Adafactor, separately; none writes a frozen one", "", "the_update";
    BackwardSeed = "P303": "the backward pass is seeded once, with scale / (C·A), or C·A·N if the step is reproducible", "", "the_update";
    Unscaling = "P304": "gradients are unscaled once, by a factor of capacity C·A·N", "", "the_update";
    StatisticsMissing = "P305": "the norm and the finite check include every trainable group's gradient exactly once", "", "the_update";
    StatisticsOfOneRank = "P306": "with several ranks, the statistics that decide whether to skip the step are summed over ranks", "", "the_update";
    OptimizerOperands = "P307": "the optimizer reads the gradient, factor and finite flag that were checked", "", "the_update";
    GradientFactor = "P308": "gradients that are clipped or read by the optimizer have exactly the factor 1 / (C·A·N)", "", "the_factor_of_every_gradient";
    ScaledUse = "P309": "a scaled value is used only linearly, and added only to values with the same factor", "", "the_factor_of_every_gradient";
    SummedSteps = "P310": "a gradient sums every micro-step of this step exactly once, and all ranks exactly once; a sum in a tree adds neighbors of equal size", "", "the_factor_of_every_gradient";
    ElementsCounted = "P311": "the statistics that decide whether to skip the step, and the sums that scale it, count every gradient element exactly once over all ranks", "", "steps_of_adafactor";
    ParameterGroups = "P312": "parameter groups begin at parameter boundaries, and the optimizer reads these boundaries", "", "averages_and_parameter_groups";
    ScalerUpdate = "P313": "loss scale and step count change only in the update, depending on the finite flag that was checked", "", "state_changes_once_and_by_the_checked_flag";
    AmaxHistory = "P314": "every tensor that is quantized to an 8-bit float has a row of the amax history, in one format; the history is updated once per micro-step, with several ranks by the maximum over all of them", "", "magnitudes_of_8_bit_floats";
    AdafactorParts = "P315": "the Adafactor step of a parameter has each of its parts once, and each reads the parameter, its gradient, and the results of the earlier parts", "", "steps_of_adafactor";
    FirstValues = "P316": "optimizer state and step counts are initially zero, the loss scale positive", "", "inputs_and_first_values_are_what_the_tasks_need";
    MovingAverage = "P317": "with a moving average, every trainable group has one averaging step, after the optimizer step and with the same finite flag", "", "averages_and_parameter_groups";
    ParameterCopies = "P318": "every copy of parameters in another dtype is written once per step, whole, by the optimizer step of its group, as the cast of the new parameters; nothing else writes these parameters", "", "copies_of_parameters";
    MuonParts = "P319": "Muon steps each matrix of a group once, along the whole of its momentum orthogonalized, at the rate of its shape; its momentum is of the gradient, factor and finite flag that were checked", "", "steps_of_muon";
    DependsOnRanks = "P320": "in a reproducible plan the gradients of every trainable group, and the statistics beside them, are each added over micro-steps by one tree; ranks exchange gradients and statistics in f32, and nothing in the micro-steps; sums are rounded to no narrower dtype before those of all ranks are added; the norm is an exact sum", "", "what_depends_on_the_number_of_ranks";
    EvaluationWrites = "P401": "an evaluation writes nothing that outlives the phase except its outputs and statistics", "", "broken_evaluations_are_found";
    EvaluationIncomplete = "P402": "every output and all statistics are written completely", "", "broken_evaluations_are_found";
    EvaluationSums = "P403": "with several ranks, the statistics are summed over ranks exactly once, or never if the plan is reproducible", "", "broken_evaluations_are_found";
    EvaluationDropout = "P404": "no dropout mask is drawn", "", "broken_evaluations_are_found";
    EvaluationRanks = "P405": "the evaluation has the same ranks as the training", "", "an_evaluation_that_holds_parameters_otherwise_is_refused";
    EvaluationElements = "P406": "of every parameter that both plans use, each rank holds the same elements, in the same dtype, in both", "", "an_evaluation_that_holds_parameters_otherwise_is_refused";
    HostReach = "P501": "only copies between device and host access host memory", "", "host_memory";
    HostStreams = "P502": "copies from the host run on one stream, copies to the host on another, and nothing else runs on either", "", "host_memory";
    IndexRanges = "P601": "an input that a task reads as indices or labels has a range within the values that the task accepts; the range is checked only when the input is fed; an empty input has an empty range; for a part of an input that is read as indices, which kernels check themselves, there may be none", "", "inputs_that_are_read_as_indices";
    InputBounds = "P602": "a task reads no more of an input than is fed, and every input with axes has examples", "", "inputs_and_first_values_are_what_the_tasks_need";
    LaunchedMeaning = "P701": "a kernel that launches only GEMMs and generated kernels computes its body, whichever candidates run, sums being in any order; if it also launches something else, its candidates leave the same values behind; no such launch overwrites an operand that it may still read", "", "candidates_that_compute_something_else";
}

impl Code {
    /// The code of this id, in any case.
    pub fn find(id: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.id().eq_ignore_ascii_case(id))
    }

    /// Whether it indicates a bug in Frit: a violated contract of a pass, a graph or a plan.
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
            "| code | invariant | test |\n|---|---|---|\n"
        } else {
            "| code | meaning | remedy | test |\n|---|---|---|---|\n"
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

Every message has a code, a location (node and scope), and a remedy. `frit explain CODE` prints a row of this page.
Codes of lints (`L02`) are in [lints.md](lints.md). The last column names the test that raises the code.

The exit code is 2 if the input is invalid, 1 if a run or check with valid input failed (E101, E106, E108, E116, E118), otherwise 0.
";

const PARTS: [(&str, &str, char); 5] = [
    ("Errors", "The command stopped.", 'E'),
    ("Warnings", "The plan is written, but may not be what was intended.", 'W'),
    ("Contracts of passes", INTERNAL, 'B'),
    (
        "Invariants of graphs",
        "Checked after every pass that changes a graph; in release builds only with `--verify-each`.",
        'V',
    ),
    (
        "Invariants of plans",
        "Checked before a plan is written, and by `frit verify`. For an edited plan, the error describes the defect.",
        'P',
    ),
];
const INTERNAL: &str =
    "An error is a bug in Frit; report the model and the folder that the message names.";
