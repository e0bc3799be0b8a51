{{- define "kvist.name" -}}
{{- $name := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- if contains "kvist" $name }}{{ $name }}{{ else }}{{ printf "%s-kvist" $name }}{{ end -}}
{{- end }}

{{- define "kvist.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "kvist.name" . }}
{{- else }}default{{ end -}}
{{- end }}

{{- define "kvist.webhook" -}}
{{ include "kvist.name" . }}-webhook
{{- end }}

{{- /* Of the ValidatingWebhookConfiguration, which belongs to no namespace. */ -}}
{{- define "kvist.webhookConfiguration" -}}
{{ printf "%s-%s" .Release.Namespace (include "kvist.webhook" .) }}
{{- end }}

{{- define "kvist.selector" -}}
app.kubernetes.io/name: kvist-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvist.labels" -}}
{{ include "kvist.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: kvist
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* An image's reference: a digest wins over the tag, which is the appVersion when empty. (list $ image) */ -}}
{{- define "kvist.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{- /* Rights in a namespace with clusters. tests/operator compares them with the calls that the operator makes. */ -}}
{{- define "kvist.rules" -}}
- apiGroups: [kvist.dev]
  resources: [cacheclusters]
  verbs: [get, list, watch, patch]
- apiGroups: [kvist.dev]
  resources: [cacheclusters/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, servicemonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
# By name only: of users' Secrets those that a cluster refers to; its own ones are created, never changed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
# What routers may do the operator must hold to hand it on.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end }}

{{- define "kvist.release" -}}
{{ include "kvist.name" . }}-release
{{- end }}

{{- define "kvist.releaseAccount" -}}
{{- if and .Values.rbac.create .Values.serviceAccount.create }}{{ include "kvist.release" . }}
{{- else }}{{ include "kvist.account" . }}{{ end -}}
{{- end }}

{{- /* Metadata of the objects of the pre-delete hook: (list $ namespace weight suffix). */ -}}
{{- define "kvist.releaseMeta" -}}
{{- $root := index . 0 }}{{ $namespace := index . 1 }}{{ $name := include "kvist.release" $root -}}
{{ if $namespace -}}
name: {{ $name }}{{ if gt (len .) 3 }}{{ index . 3 }}{{ end }}
namespace: {{ $namespace }}
{{- else }}
name: {{ printf "%s-%s" $root.Release.Namespace $name }}
{{- end }}
labels:
  app.kubernetes.io/name: kvist-release
  app.kubernetes.io/instance: {{ $root.Release.Name }}
  app.kubernetes.io/part-of: kvist
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ index . 2 | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "kvist.releaseRules" -}}
- apiGroups: [kvist.dev]
  resources: [cacheclusters]
  verbs: [get, list, patch]
{{- end }}

{{- define "kvist.releaseSubjects" -}}
- kind: ServiceAccount
  name: {{ include "kvist.releaseAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{- define "kvist.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvist.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
