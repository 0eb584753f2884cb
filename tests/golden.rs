//! The numbers of verl, TRL, OpenRLHF and RAGEN: values and gradients to 1e-7 relative in float64. The
//! choices of RAGEN's filter.
//! `GRADPRISM_GOLDEN_DIR` names another directory of such files.

mod common;

use std::path::PathBuf;

use gradprism::diagnostics::{CrossScores, Marginal};
use gradprism::filter::{Compat, Filter, OnEmpty};
use gradprism::objective::{
    Aggregation, GRPO_EPSILON, GroupIndex, KlEstimator, KlGradient, KlPenalty, Surrogate,
    SurrogateForm, TokenWeights, Tokens, discounted_returns, entropy, gae, log_probs, value_loss,
    whiten,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::{Kind, Tensor};

const TOLERANCE: f64 = 1e-7;

fn cases(file: &str) -> Vec<Value> {
    let directory = std::env::var_os("GRADPRISM_GOLDEN_DIR").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
        PathBuf::from,
    );
    let path = directory.join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["format"], 1);
    let Value::Array(cases) = file["cases"].take() else { panic!("no cases in {path:?}") };
    assert!(!cases.is_empty());
    cases
}

fn get<T: DeserializeOwned>(case: &Value, key: &str) -> T {
    serde_json::from_value(case[key].clone()).unwrap_or_else(|error| panic!("{key}: {error}"))
}

fn matrix(case: &Value, key: &str) -> Tensor {
    let rows: Vec<Vec<f64>> = get(case, key);
    let width = rows[0].len() as i64;
    Tensor::from_slice(&rows.concat()).reshape([rows.len() as i64, width])
}

/// Every element, relative to the larger of its own size and `floor`.
#[track_caller]
fn assert_tensor(found: &Tensor, expected: &Tensor, floor: f64, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let scale = expected.abs().clamp_min(floor);
    let worst = ((found - expected).abs() / scale).max().double_value(&[]);
    assert!(worst <= TOLERANCE, "{what}: {worst:e} off\n{found}\n{expected}");
}

#[track_caller]
fn assert_number(found: &Tensor, expected: f64, what: &str) {
    common::assert_close(
        found.double_value(&[]),
        expected,
        TOLERANCE,
        expected.abs().max(1e-3),
        what,
    );
}

fn gradient(loss: &Tensor, input: &Tensor) -> Tensor {
    let gradient = Tensor::run_backward(&[loss], &[input], false, false).remove(0);
    if gradient.defined() { gradient } else { input.zeros_like() }
}

#[test]
fn golden_policy_loss() {
    for (index, case) in cases("policy_loss.json").iter().enumerate() {
        let what = format!("case {index}, {}", case["source"]);
        let algorithm = &case["algorithm"];
        let surrogate = Surrogate {
            form: get::<SurrogateForm>(algorithm, "surrogate"),
            clip_low: get(algorithm, "clip_low"),
            clip_high: get(algorithm, "clip_high"),
            dual_clip: get(algorithm, "dual_clip"),
            log_ratio_clamp: get(algorithm, "log_ratio_clamp"),
        };
        let aggregation: Aggregation = get(algorithm, "aggregation");
        let logp = matrix(case, "logp").set_requires_grad(true);
        let tokens = Tokens {
            logp: logp.shallow_clone(),
            old_logp: matrix(case, "old_logp"),
            ref_logp: None,
            sampler_logp: None,
            advantages: matrix(case, "advantages"),
            mask: matrix(case, "mask"),
        }
        .masked()
        .unwrap();
        let weights =
            TokenWeights::new(aggregation, get(algorithm, "norm_length"), &tokens.mask).unwrap();
        let term = surrogate.term(&tokens.logp, &tokens.old_logp, &tokens.advantages, &tokens.mask);
        let loss = weights.sum(&term.attach(&tokens.logp)).unwrap();
        assert_number(&loss, get(case, "loss"), &what);
        // Gradients far below the largest are held to its scale: the peers add 1e-8 to lengths.
        let expected = matrix(case, "grad_logp");
        let floor = expected.abs().max().double_value(&[]).max(1e-12) * 1e-3;
        assert_tensor(&gradient(&loss, &logp), &expected, floor, &what);
    }
}

#[test]
fn golden_value_loss() {
    for (index, case) in cases("value_loss.json").iter().enumerate() {
        let what = format!("case {index}");
        let values = matrix(case, "values").set_requires_grad(true);
        let weights =
            TokenWeights::new(get(case, "aggregation"), None, &matrix(case, "mask")).unwrap();
        let (old, returns) = (matrix(case, "old_values"), matrix(case, "returns"));
        let loss = value_loss(&values, &old, &returns, get(case, "clip"), &weights).unwrap();
        assert_number(&loss, get(case, "loss"), &what);
        let expected = matrix(case, "grad_values");
        let floor = expected.abs().max().double_value(&[]) * 1e-3;
        assert_tensor(&gradient(&loss, &values), &expected, floor, &what);
    }
}

#[test]
fn golden_kl() {
    for (index, case) in cases("kl.json").iter().enumerate() {
        let what = format!("case {index}, {}", case["source"]);
        let penalty = KlPenalty {
            coef: 1.0,
            estimator: get::<KlEstimator>(case, "estimator"),
            gradient: get::<KlGradient>(case, "gradient"),
            log_ratio_clamp: get(case, "log_ratio_clamp"),
            value_clamp: get(case, "value_clamp"),
        };
        let logp = matrix(case, "logp").set_requires_grad(true);
        let term = penalty.term(&logp, &matrix(case, "ref_logp"));
        // The peers subtract numbers of order 1 where x is small.
        assert_tensor(&term.value, &matrix(case, "value"), 1e-6, &what);
        let loss = term.attach(&logp).sum(Kind::Double);
        assert_tensor(&gradient(&loss, &logp), &matrix(case, "grad_logp"), 1e-6, &what);
    }
}

#[test]
fn golden_entropy() {
    for (index, case) in cases("entropy.json").iter().enumerate() {
        let what = format!("case {index}");
        let logits = matrix(case, "logits").set_requires_grad(true);
        let found = entropy(&log_probs(&logits, get(case, "temperature")));
        let expected: Vec<f64> = get(case, "entropy");
        assert_tensor(&found, &Tensor::from_slice(&expected), 1e-6, &what);
        let found = gradient(&found.sum(Kind::Double), &logits);
        assert_tensor(&found, &matrix(case, "grad_logits"), 1e-6, &what);
    }
}

#[test]
fn golden_advantages() {
    for (index, case) in cases("advantages.json").iter().enumerate() {
        let what = format!("case {index}, {}", case["estimator"]);
        let mask = matrix(case, "mask");
        let rewards = Tensor::from_slice(&get::<Vec<f64>>(case, "rewards"));
        let per_row = || GroupIndex::new(&get::<Vec<i64>>(case, "groups"), &rewards);
        let spread = |advantages: Tensor| advantages.unsqueeze(1) * &mask;
        let token_rewards = || matrix(case, "token_rewards");
        let mut returns = None;
        let found = match case["estimator"].as_str().unwrap() {
            "grpo" => {
                assert_eq!(get::<f64>(case, "epsilon"), GRPO_EPSILON);
                spread(per_row().grpo(&rewards, GRPO_EPSILON))
            }
            "dr_grpo" => spread(per_row().dr_grpo(&rewards)),
            "rloo" => spread(per_row().rloo(&rewards)),
            "gae" => {
                let (gamma, lam) = (get(case, "gamma"), get(case, "lam"));
                let found =
                    gae(&token_rewards(), &matrix(case, "values"), &mask, gamma, lam).unwrap();
                returns = Some(found.returns);
                whiten(&found.advantages, &mask).unwrap()
            }
            "reinforce_plus_plus" => {
                let found =
                    discounted_returns(&token_rewards(), &mask, get(case, "gamma")).unwrap();
                let whitened = whiten(&found, &mask).unwrap();
                returns = Some(found);
                whitened
            }
            other => panic!("an estimator named {other}"),
        };
        assert_tensor(&(found * &mask), &(matrix(case, "advantages") * &mask), 1e-3, &what);
        if let (Some(returns), false) = (returns, case["returns"].is_null()) {
            assert_tensor(&(returns * &mask), &(matrix(case, "returns") * &mask), 1e-3, &what);
        }
    }
}

#[test]
fn golden_mutual_information() {
    let mut compared = 0;
    for (index, case) in cases("mutual_information.json").iter().enumerate() {
        let scores = CrossScores::new(
            &matrix(case, "log_likelihood"),
            &get::<Vec<usize>>(case, "lengths"),
            &get::<Vec<usize>>(case, "column"),
            &get::<Vec<usize>>(case, "prompt_signature"),
        )
        .unwrap();
        for (form, marginal) in [("metrics", Marginal::Code), ("paper_form", Marginal::Paper)] {
            let found = serde_json::to_value(scores.metrics(marginal)).unwrap();
            for (name, expected) in case[form].as_object().unwrap() {
                let what = format!("case {index}, {form}, {name}");
                let expected = expected.as_f64().unwrap();
                let found = found[name].as_f64().unwrap_or_else(|| panic!("{what} is missing"));
                common::assert_close(found, expected, TOLERANCE, expected.abs().max(1e-3), &what);
                compared += 1;
            }
        }
    }
    // 25 metrics of RAGEN's and 3 in the paper's form, in ten cases.
    assert_eq!(compared, 10 * (25 + 3));
}

#[test]
fn golden_filter() {
    for (index, case) in cases("filter.json").iter().enumerate() {
        let filter = Filter {
            strategy: get(case, "strategy"),
            direction: get(case, "direction"),
            mass: get(case, "mass"),
            value: get(case, "value"),
            epsilon: get(case, "epsilon"),
            include_zero: get(case, "include_zero"),
            on_empty: OnEmpty::Skip,
            compat: Some(Compat::Ragen),
        };
        let scores: Vec<f64> = get(case, "scores");
        let selection = filter.select(&Tensor::from_slice(&scores)).unwrap();
        let mask = selection.to_host().unwrap();
        let found: Vec<usize> = (0..scores.len()).filter(|group| mask[*group]).collect();
        let expected: Vec<usize> = get(case, "kept");
        let what = format!("case {index}, {filter:?} of {scores:?}");
        assert_eq!(selection.count, expected.len(), "{what}");
        // Of equal scores it may be others, but their scores are the same.
        let sorted = |groups: &[usize]| {
            let mut scores: Vec<f32> = groups.iter().map(|group| scores[*group] as f32).collect();
            scores.sort_by(f32::total_cmp);
            scores
        };
        if get(case, "has_ties") {
            assert_eq!(sorted(&found), sorted(&expected), "{what}");
        } else {
            assert_eq!(found, expected, "{what}");
        }
    }
}
