//! Loading TorchScript policies: signatures, outputs, tied weights, dtypes, selection.

mod common;

use common::{fixture, gradprism, stderr};
use gradprism::policy::{
    Dtype, Inputs, ObservationDtype, Output, Policy, PolicyKind, PolicyOptions, Role,
};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

fn options() -> PolicyOptions {
    common::one_thread();
    PolicyOptions::default()
}

fn ids(rows: &[&[i64]]) -> (Tensor, Tensor) {
    let length = rows.iter().map(|row| row.len()).max().unwrap();
    let padded = |fill: fn(&i64) -> i64| -> Vec<i64> {
        rows.iter()
            .flat_map(|row| {
                let mut row: Vec<i64> = row.iter().map(fill).collect();
                row.resize(length, 0);
                row
            })
            .collect()
    };
    let shape = [rows.len() as i64, length as i64];
    (
        Tensor::from_slice(&padded(|id| *id)).reshape(shape),
        Tensor::from_slice(&padded(|_| 1)).reshape(shape),
    )
}

fn logits(policy: &Policy, rows: &[&[i64]]) -> Tensor {
    let (ids, mask) = ids(rows);
    policy.token_logits(&ids, &mask).unwrap()
}

fn distance(left: &Tensor, right: &Tensor) -> f64 {
    (left - right).abs().max().double_value(&[])
}

#[test]
fn a_batch_gives_each_row_what_it_gets_alone() {
    for name in ["gpt2.pt", "llama.pt", "tied_traced.pt", "optional_mask.pt", "dict_output.pt"] {
        let policy = Policy::load(&fixture(name), &options()).unwrap();
        assert_eq!(policy.choices(), 16);
        let (long, short): (&[i64], &[i64]) = (&[1, 5, 2, 9, 11, 3, 3], &[4, 4, 7]);
        let batch = logits(&policy, &[long, short]);
        assert!(distance(&batch.select(0, 0), &logits(&policy, &[long]).select(0, 0)) < 1e-5);
        let short_alone = logits(&policy, &[short]).select(0, 0);
        assert!(distance(&batch.select(0, 1).narrow(0, 0, 3), &short_alone) < 1e-5, "{name}");
    }
}

#[test]
fn arguments_without_known_names_are_told_by_their_order() {
    let inputs = Inputs::Order(vec![Role::InputIds, Role::AttentionMask]);
    let policy =
        Policy::load(&fixture("unknown_inputs.pt"), &PolicyOptions { inputs, ..options() })
            .unwrap();
    assert_eq!(logits(&policy, &[&[1, 2]]).size(), [1, 2, 16]);
    let inputs = Inputs::Order(vec![Role::InputIds; 3]);
    let error = Policy::load(&fixture("unknown_inputs.pt"), &PolicyOptions { inputs, ..options() });
    assert!(error.err().unwrap().to_string().contains("names 3 arguments"));
}

#[test]
fn an_output_of_several_tensors_needs_a_word() {
    let output = Output::Named("0".into());
    let policy =
        Policy::load(&fixture("tuple_output.pt"), &PolicyOptions { output, ..options() }).unwrap();
    assert_eq!(policy.choices(), 16);
    // A dictionary names its logits.
    assert_eq!(Policy::load(&fixture("dict_output.pt"), &options()).unwrap().choices(), 16);
    let output = Output::Named("hidden".into());
    let policy =
        Policy::load(&fixture("dict_output.pt"), &PolicyOptions { output, ..options() }).unwrap();
    assert_eq!(policy.choices(), 8);
    let output = Output::Named("logit".into());
    let error = Policy::load(&fixture("dict_output.pt"), &PolicyOptions { output, ..options() });
    assert!(error.err().unwrap().to_string().contains("`logits`"));
}

#[test]
fn a_tied_weight_is_one_parameter_with_one_gradient() {
    for name in ["gpt2.pt", "tied_traced.pt"] {
        let policy = Policy::load(&fixture(name), &options()).unwrap();
        let tied: Vec<_> = policy.parameters().iter().filter(|p| p.names.len() > 1).collect();
        assert_eq!(tied.len(), 1, "{name}");
        let mut names = tied[0].names.clone();
        names.sort();
        assert_eq!(names, ["lm_head.weight", "wte.weight"]);
        let elements: usize = policy.parameters().iter().map(|p| p.numel()).sum();
        assert_eq!(elements, 1856);

        // Its gradient is that of both uses together: a step along it changes the loss as it says.
        let loss = |policy: &Policy| {
            logits(policy, &[&[1, 2, 3]])
                .log_softmax(-1, Kind::Float)
                .select(2, 4)
                .sum(Kind::Double)
        };
        let value = loss(&policy);
        let gradient = Tensor::run_backward(&[&value], &[&tied[0].tensor], false, false).remove(0);
        const STEP: f64 = 1e-3;
        let norm = gradient.norm().double_value(&[]);
        tch::no_grad(|| {
            let mut weight = tied[0].tensor.shallow_clone();
            weight += &gradient * (STEP / norm);
        });
        let change = loss(&policy).double_value(&[]) - value.double_value(&[]);
        common::assert_close(change, STEP * norm, 0.05, STEP * norm, name);
    }
}

#[test]
fn a_cast_keeps_weights_tied_and_logits_close() {
    let single = Policy::load(&fixture("gpt2.pt"), &options()).unwrap();
    let cast =
        |dtype| Policy::load(&fixture("gpt2.pt"), &PolicyOptions { dtype, ..options() }).unwrap();
    let double = cast(Dtype::Float64);
    assert_eq!(double.dtype(), Kind::Double);
    assert_eq!(double.parameters().len(), single.parameters().len());
    let row: &[i64] = &[3, 1, 4, 1, 5];
    assert!(distance(&logits(&double, &[row]), &logits(&single, &[row])) < 1e-5);
    let half = cast(Dtype::Bfloat16);
    assert!(distance(&logits(&half, &[row]), &logits(&single, &[row])) < 0.2);
    let stored = Policy::load(&fixture("bf16.pt"), &options()).unwrap();
    assert_eq!(stored.dtype(), Kind::BFloat16);
    assert_eq!(distance(&logits(&stored, &[row]), &logits(&half, &[row])), 0.0);
}

#[test]
fn a_pattern_selects_among_the_parameters_that_require_gradients() {
    let names = |name: &str, pattern: &str| -> Vec<String> {
        let trainable = regex::Regex::new(pattern).unwrap();
        let policy =
            Policy::load(&fixture(name), &PolicyOptions { trainable, ..options() }).unwrap();
        policy.trainable().map(|parameter| parameter.name().to_owned()).collect()
    };
    assert_eq!(names("gpt2.pt", r"^ln_f\.").len(), 2);
    // Either name of a tied weight will do.
    assert_eq!(names("gpt2.pt", "lm_head").len(), 1);
    let all = names("partly_frozen.pt", "");
    assert!(!all.iter().any(|name| name.contains("wte") || name.contains("wpe")), "{all:?}");
    assert!(!all.is_empty());
}

#[test]
fn active_dropout_is_a_warning() {
    let policy = Policy::load(&fixture("dropout.pt"), &options()).unwrap();
    assert!(matches!(policy.warnings(), [text] if text.contains("dropout")));
    assert!(Policy::load(&fixture("gpt2.pt"), &options()).unwrap().warnings().is_empty());
}

#[test]
fn a_reference_needs_no_trainable_parameter() {
    for name in ["no_grad.pt", "frozen.pt", "no_parameters.pt"] {
        assert!(Policy::load(&fixture(name), &options()).is_err());
        let policy = Policy::load_without_gradient(&fixture(name), &options()).unwrap();
        assert_eq!(logits(&policy, &[&[1, 2]]).size(), [1, 2, 16], "{name}");
    }
    assert!(Policy::load_without_gradient(&fixture("nan_weights.pt"), &options()).is_err());
}

#[test]
fn a_step_policy_takes_observations() {
    let step =
        PolicyOptions { kind: PolicyKind::Step, observation_shape: Some(vec![4]), ..options() };
    let policy = Policy::load(&fixture("mlp_step.pt"), &step).unwrap();
    assert_eq!(policy.choices(), 3);
    let observations = Tensor::zeros([5, 4], (Kind::Float, Device::Cpu));
    assert_eq!(policy.step_logits(&observations).unwrap().size(), [5, 3]);
    let error = Policy::load(
        &fixture("mlp_step.pt"),
        &PolicyOptions { observation_shape: Some(vec![7]), ..step.clone() },
    );
    assert!(error.err().unwrap().to_string().contains("observations of shape [7]"));
    let integers = PolicyOptions { observation_dtype: ObservationDtype::Int64, ..step };
    assert!(Policy::load(&fixture("mlp_step.pt"), &integers).is_err());
}

#[test]
fn inspect_prints_what_a_checkpoint_is() {
    let inspect = |name: &str, more: &[&str]| {
        let path = fixture(name);
        let mut command = gradprism(&["inspect"]);
        let output = command.arg(path).args(more).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
    };
    let (code, text, _) = inspect("gpt2.pt", &["--parameters"]);
    assert_eq!(code, Some(0));
    for expected in [
        "forward(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor)",
        "1856 parameters in 28 tensors, 1856 trainable, float32",
        "tied: wte.weight = lm_head.weight",
        "logits over 16",
        "no problem found",
        "ln_f.bias [8] float32",
    ] {
        assert!(text.contains(expected), "`{text}` does not say `{expected}`");
    }
    let (code, text, _) = inspect("frozen.pt", &["--json"]);
    assert_eq!(code, Some(1));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["parameters"], 0);
    assert!(report["errors"][0].as_str().unwrap().contains("torch.jit.freeze"));
    let (code, text, _) = inspect("mlp_step.pt", &["--kind", "step", "--observation", "4"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, _, _) = inspect("unknown_inputs.pt", &["--inputs", "[input_ids, attention_mask]"]);
    assert_eq!(code, Some(0));
    let (code, _, error) = inspect("state_dict.pt", &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("torch.save"), "{error}");
}

/// Causal models of Hugging Face, by the example that the README names.
#[test]
fn exported_models_are_studied_by_the_batched_engine() {
    let Some(python) = common::python("exported_models_are_studied_by_the_batched_engine") else {
        return;
    };
    for shape in ["gpt2", "llama"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(checkpoint) = common::export_hf(&python, shape, folder.path()) else { return };
        let lines = common::lines(&common::synthetic_batch(2, 1));
        let study = common::StudyFolder::new(&checkpoint, &lines, "");
        let output = study.run(&["--set", "decomposition.engine=batched"]);
        assert_eq!(output.status.code(), Some(0), "{shape}: {}", stderr(&output));
        assert!(!stderr(&output).contains("row by row"), "{shape}: {}", stderr(&output));
        let norm = study.prompts()[0]["task_norm"].as_f64().unwrap();
        assert!(norm > 0.0, "{shape}: {norm}");
    }
}

#[test]
fn the_doctor_finds_this_build_well() {
    let output = gradprism(&["doctor", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found = |name: &str| {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        check["found"].as_str().unwrap().to_owned()
    };
    assert_eq!(found("autograd"), "works");
    assert!(found("libtorch").starts_with("2.13.0"), "{}", found("libtorch"));
    // The release that the doctor names is the one in the lock file.
    let lock = include_str!("../Cargo.lock");
    let at = lock.find("name = \"tch\"\nversion = \"").unwrap();
    let version = lock[at..].split('"').nth(3).unwrap();
    let minor = version.rsplit_once('.').unwrap().0;
    assert!(found("libtorch").contains(&format!("with tch {minor},")), "{version}");
}
