//! The batched engine against the plain one: the same numbers to 1e-5 in float32 and 1e-10 in
//! float64, or a word that it cannot.

mod common;

use std::path::Path;

use common::{StudyFolder, assert_close, config, fixture, lines, stderr, synthetic_batch};
use gradprism::rollout::{Batch, Content};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

const YAML: &str =
    "algorithm: {kl: {coef: 0.1}, entropy_coef: 0.05}\ndecomposition: {by_parameter: true}\n";

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// A study by both engines; the batched one must not hand over to the plain one.
fn both(folder: &StudyFolder, settings: &[&str]) -> (Vec<Value>, Vec<Value>, String) {
    let run = |engine: &str| {
        let engine = format!("decomposition.engine={engine}");
        let mut arguments = vec!["--force", "--set", &engine];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = folder.run(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        (folder.prompts(), stderr(&output))
    };
    let (plain, _) = run("loop");
    let (batched, log) = run("batched");
    (plain, batched, log)
}

/// Every number of two records, signal² and noise² relative to ‖g_task‖², norms to themselves.
fn assert_equal(plain: &[Value], batched: &[Value], tolerance: f64, what: &str) {
    assert_eq!(plain.len(), batched.len());
    for (plain, batched) in plain.iter().zip(batched) {
        let what = format!("{what}, group {}", plain["group_id"]);
        let task_sq = number(&plain["task_norm"]).powi(2);
        for key in ["signal_sq", "noise_sq"] {
            let (found, expected) = (number(&batched[key]), number(&plain[key]));
            assert_close(found, expected, tolerance, task_sq, &format!("{what}: {key}"));
        }
        for key in ["task_norm", "kl_unit_norm", "entropy_unit_norm", "reg_norm", "total_norm"] {
            let (found, expected) = (number(&batched[key]), number(&plain[key]));
            assert_close(found, expected, tolerance, expected, &format!("{what}: {key}"));
        }
        let norms = |record: &Value| -> Vec<f64> {
            record["trajectory_task_norms"].as_array().unwrap().iter().map(number).collect()
        };
        let largest = norms(plain).into_iter().fold(0.0, f64::max);
        for (found, expected) in norms(batched).into_iter().zip(norms(plain)) {
            assert_close(found, expected, tolerance, largest, &format!("{what}: row norms"));
        }
        for (found, expected) in batched["by_parameter"]
            .as_array()
            .unwrap()
            .iter()
            .zip(plain["by_parameter"].as_array().unwrap())
        {
            assert_eq!(found["name"], expected["name"]);
            let name = format!("{what}: {}", found["name"]);
            let (found, expected) = (number(&found["signal_sq"]), number(&expected["signal_sq"]));
            assert_close(found, expected, tolerance, task_sq, &name);
        }
    }
}

fn study(checkpoint: &Path) -> StudyFolder {
    StudyFolder::new(checkpoint, &lines(&synthetic_batch(4, 3)), YAML)
}

#[test]
fn transformers_are_taken_apart_whole() {
    // Addmm, layer norm, learned positions, tied head; mm, RMS norm, rotary, gated; traced.
    for name in ["gpt2.pt", "llama.pt", "tied_traced.pt", "optional_mask.pt", "partly_frozen.pt"] {
        let folder = study(&fixture(name));
        let (plain, batched, log) = both(&folder, &["policy.dtype=float64"]);
        assert!(!log.contains("row by row"), "{name}: {log}");
        assert_equal(&plain, &batched, 1e-10, name);
        let (plain, batched, _) = both(&folder, &[]);
        assert_equal(&plain, &batched, 1e-5, name);
    }
}

#[test]
fn selected_parameters_and_every_preset() {
    let folder = study(&fixture("double.pt"));
    for settings in [
        &["policy.trainable=blocks.1"][..],
        &["policy.trainable=wte"],
        &["algorithm.preset=ppo"],
        &["algorithm.preset=dapo", "policy.temperature=0.7"],
        &["algorithm.preset=dr_grpo", "algorithm.norm_length=9"],
        &["rollouts.old_logprobs=recompute", "algorithm.kl.gradient=k2"],
    ] {
        let (plain, batched, log) = both(&folder, settings);
        assert!(!log.contains("row by row"), "{settings:?}: {log}");
        assert_equal(&plain, &batched, 1e-10, &format!("{settings:?}"));
    }
    let reference = format!("policy.reference={}", fixture("tied_traced.pt").display());
    let (plain, batched, _) = both(&folder, &[&reference, "policy.dtype=float64"]);
    assert_equal(&plain, &batched, 1e-10, "reference");
}

#[test]
fn a_layer_used_twice_is_added_before_products_are_taken() {
    let folder = study(&fixture("shared.pt"));
    let (plain, batched, log) = both(&folder, &[]);
    assert!(!log.contains("row by row"), "{log}");
    assert_equal(&plain, &batched, 1e-10, "shared");
    let (plain, batched, _) = both(&folder, &["policy.dtype=float32"]);
    assert_equal(&plain, &batched, 1e-5, "shared");
    let (plain, batched, _) = both(&study(&fixture("in_place.pt")), &[]);
    assert_equal(&plain, &batched, 1e-10, "in place");
}

/// Slices, einsum, one matrix a head, a packed projection, added positions, a grouped convolution,
/// `rms_norm`, a broadcast scale.
#[test]
fn weights_are_found_behind_views() {
    let folder = study(&fixture("views.pt"));
    let (plain, batched, log) = both(&folder, &[]);
    assert!(!log.contains("row by row"), "{log}");
    assert_equal(&plain, &batched, 1e-10, "views");
    let (plain, batched, _) = both(&folder, &["policy.dtype=float32"]);
    assert_equal(&plain, &batched, 1e-5, "views");
}

/// What the graph does not show by rows is taken by the plain way, and named.
#[test]
fn other_layers_are_taken_row_by_row() {
    // All lay tokens out as [T * B] somewhere, which the row that is recomputed shows.
    for (name, parameter) in [
        ("lstm.pt", "lstm.weight_ih_l0"),
        ("gru.pt", "gru.weight_ih_l0"),
        ("time_major.pt", "inner.weight"),
    ] {
        let folder = study(&fixture(name));
        let (plain, batched, log) = both(&folder, &[]);
        assert!(log.contains("row by row") && log.contains(parameter), "{log}");
        assert!(!log.contains("head.weight"), "{log}");
        assert_equal(&plain, &batched, 1e-10, name);
        let (plain, batched, _) = both(&folder, &["policy.dtype=float32"]);
        assert_equal(&plain, &batched, 1e-5, name);
    }
}

/// Groups beyond the token budget are taken in micro-batches, whose rows meet in the products.
#[test]
fn micro_batches_change_nothing() {
    for name in ["double.pt", "views.pt", "lstm.pt"] {
        let folder = study(&fixture(name));
        for budget in ["decomposition.token_budget=1", "decomposition.token_budget=40"] {
            let (plain, batched, _) = both(&folder, &[budget]);
            assert_equal(&plain, &batched, 1e-10, &format!("{name}, {budget}"));
        }
    }
}

/// A row of mean reward has advantage 0; alone in a micro-batch it is a row of the products still.
#[test]
fn a_micro_batch_without_an_advantage_keeps_its_rows() {
    let mut batch = synthetic_batch(3, 8);
    for group in &mut batch.groups {
        for (row, reward) in group.trajectories.iter_mut().zip([0.0, 0.5, 1.0, 0.5]) {
            row.reward = reward;
        }
    }
    let folder = StudyFolder::new(&fixture("double.pt"), &lines(&batch), YAML);
    let settings = ["decomposition.token_budget=1", "algorithm.preset=grpo"];
    let (plain, batched, _) = both(&folder, &settings);
    assert!(plain.iter().all(|record| record["trajectory_task_norms"][1] == 0.0));
    assert_equal(&plain, &batched, 1e-10, "advantage 0");
}

/// One pass for the regularizer: its norm is that of the parts together, and those are not known.
#[test]
fn combined_components_are_the_sum_of_the_parts() {
    let folder = study(&fixture("double.pt"));
    let (separate, _, _) = both(&folder, &[]);
    let (plain, batched, _) = both(&folder, &["decomposition.components=combined"]);
    for records in [&plain, &batched] {
        for (record, separate) in records.iter().zip(&separate) {
            for key in ["task_norm", "signal_sq", "reg_norm", "total_norm", "cos_task_reg"] {
                assert_eq!(record[key].is_null(), separate[key].is_null(), "{key}");
                let Some(expected) = separate[key].as_f64() else { continue };
                let found = number(&record[key]);
                assert_close(found, expected, 1e-10, expected.abs(), key);
            }
            for key in ["kl_unit_norm", "entropy_unit_norm", "cos_kl_entropy"] {
                assert!(record[key].is_null() && !separate[key].is_null(), "{key}");
            }
        }
    }
    // Nothing to combine: no pass at all, and no regularizer.
    let none = ["algorithm.kl.coef=0", "algorithm.entropy_coef=0"];
    let settings = [&none[..], &["decomposition.components=combined"]].concat();
    let (plain, batched, _) = both(&folder, &settings);
    for record in plain.iter().chain(&batched) {
        assert_eq!(number(&record["reg_norm"]), 0.0);
    }
}

fn step_batch(shape: &[i64]) -> Batch {
    let mut batch = synthetic_batch(3, 1);
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let width = shape.iter().product::<i64>() as usize;
    for row in batch.groups.iter_mut().flat_map(|group| &mut group.trajectories) {
        let length = row.mask.len();
        row.content = Content::Steps {
            observations: (0..width * length).map(|_| random.random_range(-1.0..1.0)).collect(),
            shape: shape.to_vec(),
            actions: (0..length).map(|_| random.random_range(0..3)).collect(),
        };
    }
    batch
}

#[test]
fn step_policies_are_taken_apart_too() {
    let settings = ["policy.kind=step", "rollouts.old_logprobs=recompute", "policy.dtype=float64"];
    let single = ["policy.kind=step", "rollouts.old_logprobs=recompute", "policy.dtype=float32"];
    let folder = StudyFolder::new(&fixture("mlp_step.pt"), &lines(&step_batch(&[4])), YAML);
    let (plain, batched, log) = both(&folder, &settings);
    assert!(!log.contains("row by row"), "{log}");
    assert_equal(&plain, &batched, 1e-10, "mlp");
    let (plain, batched, _) = both(&folder, &single);
    assert_equal(&plain, &batched, 1e-5, "mlp");

    let mut nested = lines(&step_batch(&[1, 5, 5]));
    for line in &mut nested {
        // Rows of 25 numbers as [1, 5, 5].
        for observation in line["observations"].as_array_mut().unwrap() {
            let numbers: Vec<f64> = observation.as_array().unwrap().iter().map(number).collect();
            *observation = serde_json::json!([numbers.chunks(5).collect::<Vec<_>>()]);
        }
    }
    let folder = StudyFolder::new(&fixture("conv_step.pt"), &nested, YAML);
    let (plain, batched, log) = both(&folder, &settings);
    assert!(!log.contains("row by row"), "{log}");
    assert_equal(&plain, &batched, 1e-10, "conv");
    let (plain, batched, _) = both(&folder, &single);
    assert_equal(&plain, &batched, 1e-5, "conv");
}

/// A model that mixes the rows of a batch is told by the row that is recomputed: an error, or the
/// plain engine.
#[test]
fn a_model_that_cannot_be_batched_is_told() {
    for name in ["mixing.pt", "batch_norm.pt", "dropout.pt"] {
        let folder = study(&fixture(name));
        let output = folder.run(&["--set", "decomposition.engine=batched"]);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", stderr(&output));
        let message = stderr(&output);
        assert!(
            message.contains("mixes the rows of a batch") && message.contains("use engine: loop"),
            "{message}"
        );
        if name == "dropout.pt" {
            continue;
        }
        let output = folder.run(&["--set", "decomposition.engine=auto"]);
        assert_eq!(output.status.code(), Some(0), "{name}: {}", stderr(&output));
        assert!(stderr(&output).contains("this run does"), "{}", stderr(&output));
        let auto = folder.prompts();
        assert_eq!(
            folder.run(&["--force", "--set", "decomposition.engine=loop"]).status.code(),
            Some(0)
        );
        assert!(
            auto == folder.prompts(),
            "{name}: the plain engine took over from the first group"
        );
    }
}

#[test]
fn the_quickstart_is_the_same_by_both() {
    let run = |engine: &str| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let mut command = common::gradprism(&["study", "--set"]);
        command.arg(format!("decomposition.engine={engine}"));
        command.args(["--set", "decomposition.by_parameter=true", "--set", "policy.dtype=float64"]);
        command.arg(config("quickstart.yaml")).arg("--out").arg(&out);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(!stderr(&output).contains("WARN"), "{}", stderr(&output));
        let text = std::fs::read_to_string(out.join("prompts.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    assert_equal(&run("loop"), &run("batched"), 1e-10, "quickstart");
}

/// A sketch is unbiased, and its error bar is right: over seeds, the exact number is within two
/// standard errors about as often as it should be, and the mean is on it.
#[test]
fn a_sketch_is_unbiased_and_knows_its_error() {
    let folder = study(&fixture("llama.pt"));
    let run = |settings: &[&str]| {
        let mut arguments = vec!["--force"];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = folder.run(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        folder.prompts()
    };
    let exact = run(&["decomposition.engine=batched"]);
    assert!(exact.iter().all(|record| record["sketch_se"].is_null()));
    let seeds = 40;
    let sketches: Vec<Vec<Value>> = (0..seeds)
        .map(|seed| {
            let seed = format!("decomposition.seed={seed}");
            run(&["decomposition.engine=sketch", "decomposition.sketch_dimensions=32", &seed])
        })
        .collect();
    for key in ["signal_sq", "noise_sq"] {
        let (mut inside, mut count) = (0, 0);
        for (group, exact) in exact.iter().enumerate().filter(|(_, row)| !row["snr_se"].is_null()) {
            let expected = number(&exact[key]);
            let found: Vec<f64> = sketches.iter().map(|rows| number(&rows[group][key])).collect();
            let errors: Vec<f64> =
                sketches.iter().map(|rows| number(&rows[group]["sketch_se"][key])).collect();
            let n = found.len() as f64;
            let mean = found.iter().sum::<f64>() / n;
            let spread = found.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let off = (mean - expected) / (spread / n).sqrt();
            assert!(off.abs() < 4.0, "{key}, group {group}: {off} standard errors off");
            let mean_error = errors.iter().map(|error| error * error).sum::<f64>() / n;
            let ratio = (mean_error / spread).sqrt();
            assert!(
                (0.6..1.7).contains(&ratio),
                "{key}, group {group}: error bar {ratio} of the spread"
            );
            inside += found
                .iter()
                .zip(&errors)
                .filter(|(found, error)| (*found - expected).abs() < 2.0 * **error)
                .count();
            count += found.len();
        }
        assert!(count > 0);
        // 95 % if the estimates were normal.
        assert!(inside * 100 > count * 85, "{key}: {inside} of {count} within two standard errors");
    }
}

/// The sketch of the loop's gradients is that of the batch: parameters taken row by row and found in
/// the graph, seed by seed.
#[test]
fn a_sketch_does_not_depend_on_the_way() {
    for name in ["lstm.pt", "views.pt"] {
        let folder = study(&fixture(name));
        let run = |settings: &[&str]| {
            let mut arguments = vec!["--force", "--set", "decomposition.engine=sketch"];
            settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
            let output = folder.run(&arguments);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            folder.prompts()
        };
        let whole = run(&[]);
        let chunked = run(&["decomposition.token_budget=40"]);
        assert_equal(&whole, &chunked, 1e-10, name);
        let single = run(&["decomposition.token_budget=1"]);
        assert_equal(&whole, &single, 1e-10, name);
    }
}
